"""Step records, and the fit: known coefficients come back, also when pools slow each other down."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cluster.simulation.step_fit import fit_costs, fit_steps, nonnegative_least_squares, read_records
from cluster.simulation.step_model import StepModel
from cluster.user_error import UserError
from replicas.engine.step_record import StepRecord
from replicas.engine.step_recorder import StepRecorder
from scheduler.plan import Slice, StepPlan
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
    """Prefill works half of the time; decode steps take 1.5 times as long for the part that it overlaps, prompts 1.2
    times: decode works all the time."""
    rng, now_s = random.Random(2), 0.0
    prompts: list[list[float]] = []
    while now_s < 60:
        length = rng.randint(100, 300)
        took_s = 1.2 * (0.01 + 4e-3 * length)
        prompts.append([now_s, now_s + took_s, 0, 0, length, 0, 0])
        now_s += took_s + rng.uniform(0.5, 1.5)
    steps: list[list[float]] = []
    now_s = 0.0
    while now_s < 60:
        rows, context = rng.randint(1, 16), rng.randint(100, 5000)
        alone_s = 0.02 + 0.003 * rows + 2e-6 * context
        took_s = end_beside(prompts, now_s, alone_s, 1.5) - now_s
        steps.append([now_s, now_s + took_s, rows, context, 0, 0, 0])
        now_s += took_s + 0.001
    for name, records in {"prefill-1.jsonl": prompts, "decode-2.jsonl": steps}.items():
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    costs, lines = fit_costs(tmp_path, 1000)
    assert costs.decode.contention == pytest.approx(1.5, abs=0.02)
    assert costs.decode.row_s == pytest.approx(0.003, rel=0.02)
    assert costs.decode.overhead_s == pytest.approx(0.001)
    # Decode pauses for its overhead only, so what prompts take alone cannot be told from what they take beside it.
    assert costs.prefill.contention * costs.prefill.prompt_token_s == pytest.approx(1.2 * 4e-3, rel=0.02)
    assert len(lines) == 2


def test_steps_of_other_times_are_left_out(tmp_path: Path) -> None:
    """From second 30 on all steps take 1.3 times as long."""
    rng, now_s, steps = random.Random(5), 0.0, []
    while now_s < 60:
        rows, context = rng.randint(1, 16), rng.randint(100, 5000)
        took_s = (0.02 + 0.003 * rows + 2e-6 * context) * (1.3 if now_s >= 30 else 1.0)
        steps.append([now_s, now_s + took_s, rows, context, 0, 0, 0])
        now_s += took_s
    (tmp_path / "decode-1.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    before, after = (fit_costs(tmp_path, 1000, *times)[0].decode for times in ((0.0, 30.0), (30.0, 60.0)))
    assert before.base_s == pytest.approx(0.02)
    assert after.base_s == pytest.approx(1.3 * 0.02)
    slower = before.slower(1.3)
    assert slower.step_s(4, 1000) == pytest.approx(after.step_s(4, 1000))
    assert slower.contention == before.contention
    with pytest.raises(UserError, match="too few steps of decode"):
        fit_costs(tmp_path, 1000, 100.0)


def end_beside(others: list[list[float]], start_s: float, alone_s: float, contention: float) -> float:
    """When work is done that goes 1 / contention as fast while one of the others is under way: in small pieces."""
    piece_s, now_s, left_s = 1e-4, start_s, alone_s
    while left_s > 0:
        left_s -= piece_s / (contention if any(start <= now_s < end for start, end, *_ in others) else 1.0)
        now_s += piece_s
    return now_s


def test_recorder_writes_what_was_launched(tmp_path: Path) -> None:
    recorder = StepRecorder(str(tmp_path), "decode")
    chunk = Slice.of_prompt("a", 0, 4, (1, 2, 3))
    row = Slice("b", 0, 1, 9)
    for step_id in (0, 1):
        recorder.launched(StepPlan(step_id, (), (), (), (row, chunk)), 0.0)
    recorder.committed(1)  # step 0 was abandoned
    (file,) = tmp_path.iterdir()
    (line,) = file.read_text().splitlines()
    start_s, end_s, *shape = json.loads(line)
    assert end_s > start_s == 0.0
    assert shape == [1, 10, 3, 5 + 6 + 7, 3 * 4]


def test_without_a_folder_nothing_is_kept() -> None:
    recorder = StepRecorder()
    recorder.launched(StepPlan(0, (), (), (), (Slice("b", 0, 1, 9),)), 0.0)
    recorder.committed(0)
    assert not recorder._launched


def test_what_the_recorder_writes_the_fit_reads(tmp_path: Path) -> None:
    recorder = StepRecorder(str(tmp_path), "decode")
    (tmp_path / "notes.jsonl").write_text("not ours\n")
    plan = StepPlan(7, (), (), (), (Slice("b", 0, 1, 9), Slice.of_prompt("a", 0, 4, (1, 2, 3))))
    recorder.launched(plan, 12.5)
    recorder.committed(7)
    ((record,),) = read_records(tmp_path)["decode"]
    assert record.start_s == 12.5
    assert record.end_s > 12.5
    assert record.shape == StepShape.of(plan)
    assert StepRecord.of_line(record.line()) == record


@pytest.mark.parametrize(
    "line",
    [
        "[1.0, 2.0, 1, 10]",
        "[1.0, 2.0, 1, 10, 3, 18, 0]",
        "[2.0, 1.0, 1, 10, 3, 18]",
        "[1.0, NaN, 1, 10, 3, 18]",
        '[1.0, "2.0", 1, 10, 3, 18]',
        "[1.0, 2.0, 1, 10.5, 3, 18]",
        '{"start_s": 1.0}',
    ],
)
def test_a_line_that_is_no_step_record_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "decode-1.jsonl").write_text("[0.0, 1.0, 1, 10, 3, 18]\n" * 20 + line + "\n")
    with pytest.raises(UserError, match=r"decode-1\.jsonl: not a file of step records"):
        fit_costs(tmp_path, 1000)


@pytest.mark.parametrize("text", [None, "nonsense\n", "[1.0, 2.0, 1, 1, 0, 0]\n"])
def test_unusable_records_are_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "decode-1.jsonl").write_text(text)
    with pytest.raises(UserError, match=str(tmp_path)):
        fit_costs(tmp_path, 1000)
