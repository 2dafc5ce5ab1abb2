"""What each kernel adds to a step, by a trace of overlapping ones."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.campaign_alone import ALONE
from benchmarks.gpu.quantised_pieces import PIECES as QUANTISED
from benchmarks.gpu.step_kernels import PIECES, Launch, added_us, figures_of, launches_in


def _kernel(name: str, start_us: float, duration_us: float, grid: list[int]) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start_us, "dur": duration_us, "args": {"grid": grid}}


def test_launches_are_a_traces_kernels_by_start() -> None:
    events = [
        _kernel("second", 7.0, 2.0, [3, 2, 2]),
        {"cat": "gpu_memcpy", "name": "a copy", "ts": 0.0, "dur": 50.0, "args": {}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        _kernel("first", 5.0, 1.5, [4, 1, 1]),
    ]
    assert launches_in(events) == [Launch("first", 4, 5.0, 6.5), Launch("second", 12, 7.0, 9.0)]


def test_a_trace_without_kernels_is_no_step_of_no_time() -> None:
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        launches_in([{"cat": "gpu_memcpy", "name": "a copy", "ts": 0.0, "dur": 50.0, "args": {}}])


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([Launch("b", 1, 10.0, 15.0)], [5.0]),  # behind it
        ([Launch("b", 1, 2.0, 15.0)], [5.0]),  # there early: it waited for the first
        ([Launch("b", 1, 2.0, 9.0)], [0.0]),  # within it
        ([Launch("b", 1, 20.0, 23.0)], [3.0]),  # nothing ran for a while, which it did not add
        ([Launch("b", 1, 2.0, 12.0), Launch("b", 1, 3.0, 11.0), Launch("b", 1, 11.5, 13.0)], [2.0, 0.0, 1.0]),
    ],
)
def test_a_kernel_adds_what_lies_between_the_last_end_and_its_own(others: list[Launch], expected: list[float]) -> None:
    assert added_us([Launch("a", 8, 0.0, 10.0), *others]) == {("a", 8): [10.0], ("b", 1): expected}


def test_figures_are_of_one_step_and_sizes_are_apart() -> None:
    launches = [
        Launch("product", 96, 0.0, 30.0), Launch("product", 448, 30.0, 130.0), Launch("norm", 1, 130.0, 134.0),
        Launch("product", 96, 140.0, 172.0), Launch("product", 448, 172.0, 270.0), Launch("norm", 1, 270.0, 272.0),
    ]  # fmt: skip
    assert figures_of(launches, num_steps=2) == {
        "added_us": 133.0,
        "kernels": {"product x 448": [1.0, 99.0, 99.0], "product x 96": [1.0, 31.0, 31.0]},
        "others_us": 3.0,
    }


def test_each_is_a_campaigns_piece_of_a_measured_ones_model() -> None:
    assert set(PIECES) <= set(ALONE)
    assert {QUANTISED[of].said for of in PIECES.values()} == {None}, "an engine of ours"
