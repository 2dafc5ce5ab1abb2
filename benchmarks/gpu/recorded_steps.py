"""What the steps of a served run took, by their rows: from what the engine recorded (`testing.step_record_dir`).

Beside the times of steps alone that tells what serving costs an engine: other threads, the queue, the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from replicas.engine.step_record import StepRecord, record_files

_WIDTH = 8  # rows of one line


def read_steps(folder: Path) -> dict[str, list[StepRecord]]:
    """By pool, in the order of their begin. A line that was cut short is left out. Raises OSError."""
    steps: dict[str, list[StepRecord]] = defaultdict(list)
    for pool, path in record_files(folder):
        for line in path.read_bytes().splitlines():
            try:
                steps[pool].append(StepRecord.of_line(line))
            except ValueError:
                continue
    return {pool: sorted(records) for pool, records in steps.items()}


def told(steps: Iterable[StepRecord]) -> dict[str, Any]:
    """rows: steps without prompts by their rows, [steps, mean context, median ms]. prompts_ms: median of those with
    2,048 tokens of prompts or more, alone and beside rows. pauses: share of the time between steps that follow each
    other within 20 ms in which none ran."""
    steps = list(steps)
    by_rows: dict[int, list[StepRecord]] = defaultdict(list)
    prompts: dict[str, list[float]] = {"alone": [], "beside": []}
    for step in steps:
        shape = step.shape
        if shape.num_prompt_tokens >= 2048:
            prompts["beside" if shape.num_rows else "alone"].append(step.duration_s)
        elif not shape.num_prompt_tokens:
            by_rows[(shape.num_rows - 1) // _WIDTH].append(step)
    pairs = [(before, after) for before, after in pairwise(steps) if after.start_s - before.end_s < 0.02]
    paused_s = sum(max(0.0, after.start_s - before.end_s) for before, after in pairs)
    whole_s = paused_s + sum(after.duration_s for _, after in pairs)
    return {
        "rows": {
            f"{_WIDTH * index + 1} to {_WIDTH * (index + 1)}": [
                len(group),
                round(fmean(step.shape.num_context_tokens / step.shape.num_rows for step in group)),
                round(1e3 * median(step.duration_s for step in group), 3),
            ]
            for index, group in sorted(by_rows.items())
        },
        "prompts_ms": {name: round(1e3 * median(times), 2) for name, times in prompts.items() if times},
        "pauses": round(paused_s / whole_s, 4) if whole_s else 0.0,
    }
