"""Writes down what was in each step and how long it took, for `splitserve fit-steps`. Without a folder, nothing."""

from __future__ import annotations

import logging
import time
from collections import deque

from replicas.engine.step_record import StepRecord, record_file
from scheduler.plan import StepPlan
from scheduler.step_shape import StepShape

logger = logging.getLogger(__name__)


class StepRecorder:
    """Engine thread only. One StepRecord a line.

    A step begins when it is launched or when the one before it has ended, whichever is later, and ends when its tokens
    have been read back: with lag 1 that is the device's time, not the time until launch returned.
    """

    def __init__(self, folder: str | None = None, pool: str = "") -> None:
        self._folder = folder
        self._path = record_file(folder, pool) if folder is not None else None
        self._launched: deque[tuple[int, float, StepShape]] = deque()
        self._last_end_s = 0.0

    def beside(self, pool: str) -> StepRecorder:
        """One for steps that run beside these, as if those were another pool's."""
        return StepRecorder(self._folder, pool)

    def ran(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        """A step whose begin and end are known. Writes a line, as `committed`."""
        if self._path is not None and not plan.is_empty:
            self._write(StepRecord(start_s, end_s, StepShape.of(plan)).line())

    def launched(self, plan: StepPlan, now_s: float) -> None:
        """Its launch began at now_s."""
        if self._path is not None and not plan.is_empty:
            self._launched.append((plan.step_id, now_s, StepShape.of(plan)))

    def committed(self, step_id: int) -> None:
        """Its tokens are here. Writes a line; abandoned steps before it are forgotten. Stops where it can't write."""
        if self._path is None:
            return
        end_s = time.monotonic()
        while self._launched and self._launched[0][0] <= step_id:
            launched_id, launched_s, shape = self._launched.popleft()
            if launched_id == step_id:
                self._write(StepRecord(max(launched_s, self._last_end_s), end_s, shape).line())
        self._last_end_s = end_s

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:  # no request must suffer from it
            logger.warning("steps are recorded no more", exc_info=True, extra={"event": "step_record_failed"})
            self._path = None
