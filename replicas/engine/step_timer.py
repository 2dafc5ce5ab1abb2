"""How long steps take: on a CPU until they are launched, on a GPU until their tokens are back."""

from __future__ import annotations

from collections import deque

from scheduler.plan import StepPlan


class StepTimer:
    """Engine thread only. A step that still runs when it is launched begins then, or when the one before it has ended,
    whichever is later, and ends when its tokens have been read back.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[StepPlan, float]] = deque()
        self._ran: dict[int, tuple[StepPlan, float]] = {}  # not committed yet
        self._last_end_s = 0.0

    def ran(self, plan: StepPlan, duration_s: float) -> None:
        """It has run when it is launched, which took so long. Mutates."""
        self._ran[plan.step_id] = plan, duration_s

    def launched(self, plan: StepPlan, started_s: float) -> None:
        """It was launched at started_s and still runs. Mutates."""
        self._running.append((plan, started_s))

    def committed(self, step_id: int, now_s: float) -> tuple[StepPlan, float] | None:
        """Its tokens are here: the step and its seconds; None if it is unknown. Forgets those before. Mutates."""
        if (ran := self._ran.pop(step_id, None)) is not None:
            return ran
        found = None
        while self._running and self._running[0][0].step_id <= step_id:
            plan, started_s = self._running.popleft()
            if plan.step_id == step_id:
                found = plan, now_s - max(started_s, self._last_end_s)
        if found is not None:
            self._last_end_s = now_s
        return found

    def abandon(self) -> None:
        """Nothing that was launched is committed. Mutates."""
        self._running.clear()
        self._ran.clear()
