"""Step records, and the fit: known coefficients come back, also when pools slow each other down."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cluster.simulation.step_fit import StepRecord, fit_costs, fit_steps, nonnegative_least_squares
from cluster.simulation.step_model import StepModel
from cluster.user_error import UserError
from replicas.step_recorder import StepRecorder
from scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from scheduler.step_shape import StepShape

MODEL = StepModel(
    base_s=0.02, row_s=0.003, few_row_s=0.004, context_token_s=2e-6, prompt_token_s=4e-4, prompt_pair_s=1e-7
)


def random_shape(rng: random.Random) -> StepShape:
    rows, prompt = rng.randint(0, 16), rng.randint(1, 200)
    return StepShape(rows, rows * rng.randint(1, 500), prompt, prompt * (prompt + 1) // 2)


def test_known_coefficients_come_back() -> None:
    rng = random.Random(1)
    shapes = [random_shape(rng) for _ in range(200)]
    records = [StepRecord(0.0, MODEL.step_s(*shape), shape) for shape in shapes]
    fit = fit_steps(records, [1.0] * len(records))
    for name in ("base_s", "row_s", "few_row_s", "context_token_s", "prompt_token_s", "prompt_pair_s"):
        assert getattr(fit.model, name) == pytest.approx(getattr(MODEL, name), rel=1e-3)
    assert fit.error < 1e-6


def test_no_negative_coefficient() -> None:
    """The unconstrained solution is (3, -1)."""
    rows, targets = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [3.0, -1.0, 2.0]
    found = nonnegative_least_squares(rows, targets)
    assert found == pytest.approx([2.5, 0.0])


def test_contention_and_overhead_are_found(tmp_path: Path) -> None:
    """Prefill works half of the time; decode steps that it overlaps take 1.5 times as long for that part."""
    rng, now_s = random.Random(2), 0.0
    prompts: list[list[float]] = []
    while now_s < 60:
        length = rng.randint(100, 300)
        took_s = 1.5 * (0.01 + 4e-3 * length)
        prompts.append([now_s, now_s + took_s, 0, 0, length, 0])
        now_s += took_s + rng.uniform(0.5, 1.5)
    steps: list[list[float]] = []
    now_s = 0.0
    while now_s < 60:
        rows, context = rng.randint(1, 16), rng.randint(100, 5000)
        busy = any(start <= now_s < end - 0.1 for start, end, *_ in prompts)
        took_s = (0.02 + 0.003 * rows + 2e-6 * context) * (1.5 if busy else 1.0)
        steps.append([now_s, now_s + took_s, rows, context, 0, 0])
        now_s += took_s + 0.001
    for name, records in {"prefill-1.jsonl": prompts, "decode-2.jsonl": steps}.items():
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    costs, lines = fit_costs(tmp_path, 1000)
    assert costs.contention == pytest.approx(1.5, abs=0.1)
    assert costs.decode.row_s == pytest.approx(0.003, rel=0.1)
    assert costs.decode.overhead_s == pytest.approx(0.001)
    assert len(lines) == 3


def test_recorder_writes_what_was_launched(tmp_path: Path) -> None:
    recorder = StepRecorder(str(tmp_path), "decode")
    chunk = PrefillChunk("a", 0, 4, (1, 2, 3), ())
    row = DecodeRow("b", 0, 1, 9)
    for step_id in (0, 1):
        recorder.launched(StepPlan(step_id, (), (), (), (chunk,), (row,)), 0.0)
    recorder.committed(1)  # step 0 was abandoned
    (file,) = tmp_path.iterdir()
    (line,) = file.read_text().splitlines()
    start_s, end_s, *shape = json.loads(line)
    assert end_s > start_s == 0.0
    assert shape == [1, 10, 3, 5 + 6 + 7]


def test_without_a_folder_nothing_is_kept() -> None:
    recorder = StepRecorder()
    recorder.launched(StepPlan(0, (), (), (), (), (DecodeRow("b", 0, 1, 9),)), 0.0)
    recorder.committed(0)
    assert not recorder._launched


@pytest.mark.parametrize("text", [None, "nonsense\n", "[1.0, 2.0, 1, 1, 0, 0]\n"])
def test_unusable_records_are_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "decode-1.jsonl").write_text(text)
    with pytest.raises(UserError, match=str(tmp_path)):
        fit_costs(tmp_path, 1000)
