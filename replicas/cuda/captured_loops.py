"""Loops that make drafts, one behind the other, captured for some numbers of rows and of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from replicas.cuda.card_drafts import MOST_ROWS
from replicas.cuda.graphs import StepGraph
from replicas.start_step import start_step
from scheduler.draft_acceptance import DRAFT_COUNTS


class Loop(Protocol):
    """static_input: what `run` reads. run: drafts int64 [rows, drafts], until its next run; waits for nothing."""

    static_input: Tensor

    def run(self) -> Tensor: ...


class CapturedLoops:
    """One for each number of rows, of drafts, and with sampled rows or without; others are padded to the next."""

    def __init__(self, rows: Sequence[int], num_slots: int, max_drafts: int) -> None:
        """rows: numbers of them, ascending, that get a loop besides as many as there may be. Captures nothing yet."""
        most = min(num_slots, MOST_ROWS)
        self.sizes = sorted({*(size for size in rows if size < most), most})
        self._widths = sorted({*(width for width in DRAFT_COUNTS if width < max_drafts), max_drafts})
        self._loops: dict[tuple[int, int, bool], StepGraph[Tensor]] = {}

    @torch.inference_mode()
    def capture(self, make: Callable[[int, int, bool], Loop], memory: Any, what: str) -> None:
        """make: a loop of so many rows and drafts, and whether rows may be sampled. memory: a graph pool's. Blocks."""
        ways = [(size, width, has) for size in self.sizes for width in self._widths for has in (False, True)]
        with start_step(f"capturing the {what}'s loops", len(ways), "graphs") as step:
            for way in reversed(ways):
                loop = make(*way)
                self._loops[way] = StepGraph(loop.static_input, loop.run, memory, None)
                step.advance()

    def size_of(self, num_rows: int) -> int:
        """Of the loops for so many rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def draft(self, size: int, num_drafts: int, has_sampled: bool, values: Tensor) -> Tensor:
        """int64 [size, num_drafts or more], until the next call. values: the loop's static input. Does not wait."""
        width = next(width for width in self._widths if width >= num_drafts)
        return self._loops[size, width, has_sampled].replay(values)
