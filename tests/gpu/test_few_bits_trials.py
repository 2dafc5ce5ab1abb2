"""What a campaign tries of few bits: each way's steps are timed, with the logits of the first, and nothing stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from benchmarks.gpu import few_bits_trials, step_model
from benchmarks.gpu.campaign_alone import ALONE
from benchmarks.gpu.few_bits_trials import PIECES, steps_of_ways
from benchmarks.gpu.quantised_pieces import PIECES as QUANTISED
from benchmarks.gpu.step_model import make_runner
from benchmarks.gpu.steps_runner import StepsRunner
from replicas.cuda import quantised_card_linear
from tests.gpu.test_cuda_runner import CONFIG, card  # noqa: F401 - a fixture

pytestmark = pytest.mark.interpreted


def test_each_trial_is_a_piece_and_begins_and_ends_as_shipped() -> None:
    assert set(PIECES) <= set(ALONE)
    for trial in PIECES.values():
        first, *_, last = trial.ways.values()
        assert first is last is few_bits_trials.as_shipped


@pytest.mark.parametrize("name", PIECES)
def test_every_way_gives_the_same_logits(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (few_bits_trials, step_model):
        monkeypatch.setattr(module, "CONTEXT", 40)
    timed: list[int] = []

    def decode_ms(runner: Any, batch: int, *others: Any) -> float:
        timed.append(batch)
        return 1.5

    monkeypatch.setattr(few_bits_trials, "decode_ms", decode_ms)
    if not torch.cuda.is_available():  # where nothing is compiled
        monkeypatch.setattr(StepsRunner, "compile_layers", lambda runner: None)
    config = CONFIG | {"intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trial = PIECES[name]
    found: dict[str, Any] = {}
    runner = make_runner(tmp_path, "float16", device, QUANTISED[trial.of], 2)
    steps_of_ways(runner, trial.ways, (2,), found.update)
    assert list(found) == [f"{way}, 2 rows" for way in trial.ways]
    assert all(times == 1.5 and difference == 0.0 for times, difference in found.values())
    logits = runner.logits(few_bits_trials.set_up(2, 40, 16))
    assert logits.shape == (2, config["vocab_size"])
    assert logits.std() > 0
    assert timed == [2] * len(trial.ways)


def test_each_trials_tiles_are_others_than_those_that_ship() -> None:
    """At sizes of Llama-3.1-8B; of a small model they are the same."""
    sizes = [(28672, 4096), (4096, 14336), (4096, 4096)]
    with PIECES["fp8-wide"].ways["512 inputs"]():
        tiles = [quantised_card_linear.scaled_tile(16, *size, 200_000)[1:] for size in sizes]
    assert tiles == [(256, 4, 4, 1), (512, 4, 3, 2), (512, 4, 3, 2)]
    assert [quantised_card_linear.scaled_tile(16, *size, 200_000).num_parts for size in sizes] == [1, 4, 4]
