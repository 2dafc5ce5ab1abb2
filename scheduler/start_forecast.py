"""When one that waits would fit, and whether another that is let in before it would be over by then."""

from __future__ import annotations

from collections import deque

from scheduler.memory_budget import Budget
from scheduler.request import Request

# The last ones that started: the slowest of them says how many steps one may take from its admission to its first row.
_NUM_STARTS = 16


class StartForecast:
    """One for each scheduler; told of every step number by its caller.

    A waiting request starts at the first step from which on it would fit, if all who were let in stay as long as is
    projected. That is asked again and again, and the earliest answer stays: a later one counts those who passed it
    meanwhile. From that step on nobody is over before it any more. So who keeps it waiting beyond that step was let in
    before it by other rules.
    """

    def __init__(self, budget: Budget, lag: int) -> None:
        self._budget, self._lag = budget, lag
        self._steps_to_start: deque[int] = deque(maxlen=_NUM_STARTS)

    def started(self, num_steps: int) -> None:
        """A request has its first row so many steps after its admission. Mutates."""
        self._steps_to_start.append(num_steps)

    def ends_first(self, request: Request, waiting: Request, next_step: int) -> bool:
        """Whether `request`, let in now, is over before the step at which `waiting` could be let in, however long it
        gets. Notes that step of the latter. False where one of them is not known."""
        starts_at = self._budget.start_of(waiting)
        if starts_at is not None and (waiting.starts_at is None or starts_at < waiting.starts_at):
            waiting.starts_at = starts_at
        if waiting.starts_at is None or request.hands_over or not self._steps_to_start:
            return False
        num_rows = request.spec.max_tokens - 1
        if request.needs_known_tokens:
            num_rows *= self._lag + 1
        return next_step + max(self._steps_to_start) + num_rows + self._lag < waiting.starts_at
