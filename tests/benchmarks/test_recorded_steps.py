"""What is told of recorded steps."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.recorded_steps import read_steps, told
from replicas.engine.step_record import StepRecord
from scheduler.step_shape import StepShape


def rows(start_s: float, end_s: float, num_rows: int) -> StepRecord:
    return StepRecord(start_s, end_s, StepShape(num_rows, 1000 * num_rows, 0, 0))


STEPS = [
    rows(1.000, 1.005, 8),
    rows(1.006, 1.012, 8),  # a pause of 1 ms
    rows(1.012, 1.019, 9),
    StepRecord(1.019, 1.069, StepShape(9, 9000, 2048, 2_098_176)),
    StepRecord(5.000, 5.047, StepShape(0, 0, 2048, 2_098_176)),  # a pause that nobody could have filled
]


def test_by_rows_with_prompts_and_pauses() -> None:
    found = told(STEPS)
    assert found["rows"] == {"1 to 8": [2, 1000, 5.5], "9 to 16": [1, 1000, 7.0]}
    assert found["prompts_ms"] == {"alone": 47.0, "beside": 50.0}
    assert found["pauses"] == round(0.001 / 0.064, 4)
    assert told([]) == {"rows": {}, "prompts_ms": {}, "pauses": 0.0}


def test_files_of_both_pools_are_read_and_a_cut_line_is_not(tmp_path: Path) -> None:
    lines = [step.line() for step in STEPS]
    (tmp_path / "decode-17.jsonl").write_text("\n".join([*lines[:3], lines[3][:10]]))
    (tmp_path / "prefill-17.jsonl").write_text(lines[4] + "\n")
    steps = read_steps(tmp_path)
    assert steps == {"decode": STEPS[:3], "prefill": STEPS[4:]}
