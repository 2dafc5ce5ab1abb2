"""The comparison with golden outputs, and the golden file itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.compare import Mismatch, NearTie, first_difference

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = [5, 6, 7, 8]
MARGINS = [1.0, 1e-4, 2e-4, 0.0]


@pytest.mark.parametrize(
    ("got", "result"),
    [
        ([5, 6, 7, 8], None),
        ([9, 6, 7, 8], Mismatch(0)),
        ([5, 9, 7, 8], NearTie(1)),
        ([5, 9, 0, 0], NearTie(1)),  # only the first difference counts
        ([5, 9], NearTie(1)),
        ([5, 6, 9, 8], Mismatch(2)),
        ([5, 6, 7, 9], NearTie(3)),
        ([5, 6, 7], Mismatch(3)),
        ([5, 6, 7, 8, 9], Mismatch(4)),
        ([], Mismatch(0)),
    ],
)
def test_first_difference(got: list[int], result: NearTie | Mismatch | None) -> None:
    assert first_difference(EXPECTED, MARGINS, got) == result


def test_tolerance_is_a_parameter() -> None:
    assert first_difference(EXPECTED, MARGINS, [5, 6, 9, 8], tolerance=1e-3) == NearTie(2)
    assert first_difference(EXPECTED, MARGINS, [5, 9, 7, 8], tolerance=0.0) == Mismatch(1)


def test_golden_file_is_whole_and_covers_the_block_boundaries() -> None:
    path = GOLDEN / "golden.json"
    golden = json.loads(path.read_text(encoding="utf-8"))
    entries = golden["entries"]
    assert len({entry["name"] for entry in entries}) == len(entries) >= 64
    assert path.stat().st_size < 600_000
    lengths = {len(entry["prompt_ids"]) for entry in entries}
    assert {1, 15, 16, 17, 31, 32, 33, 300, 450, 600} <= lengths
    assert 1500 < max(lengths) < 2048 - golden["num_new_tokens"]
    assert {entry["kind"] for entry in entries} == {"text", "chat", "ids"}
    for entry in entries:
        assert len(entry["output_ids"]) == len(entry["margins"]) == golden["num_new_tokens"] == 64
        assert min(entry["margins"]) >= 0.0


def test_sampled_requests_are_twenty_and_differ() -> None:
    requests = json.loads((GOLDEN / "sampled_requests.json").read_text(encoding="utf-8"))["requests"]
    assert len({request["name"] for request in requests}) == len(requests) == 20
    for request in requests:
        assert set(request) == {"name", "prompt", "temperature", "top_k", "top_p", "seed", "n", "max_tokens"}
        assert request["temperature"] > 0
