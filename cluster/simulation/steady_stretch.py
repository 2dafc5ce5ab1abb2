"""Steady steps of a simulated engine, many at once: their times first, and what they change when somebody looks.

What comes of them is what single steps would have brought (scheduler.steady_steps). A stretch is over with its last
step, or with a message, which the next iteration takes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from cluster.simulation.simulated_calls import SimulatedCalls
from cluster.simulation.simulated_device import SimulatedDevice, StepInFlight
from scheduler.engine_core import EngineCore
from scheduler.request import Request
from scheduler.steady_steps import num_steady_steps, take_steady_steps

_MOST_STEPS = 512
_FEWEST_STEPS = 8


@dataclass(slots=True)
class _Stretch:
    """Iterations that are under way. starts_s[i]: of iteration i, and behind the last one the next's."""

    starts_s: list[float]
    commits_s: list[float]
    device_free_s: list[float]  # behind iteration i
    num_rows: int
    num_taken: int = 0  # of which the state knows already


class SteadyStretches:
    """Those of one engine, one after another."""

    def __init__(self, core: EngineCore[StepInFlight], device: SimulatedDevice, calls: SimulatedCalls) -> None:
        self._core, self._scheduler, self._device, self._calls = core, core.scheduler, device, calls
        self._stretch: _Stretch | None = None
        self._most = _FEWEST_STEPS

    def begin(self, now_s: float) -> float:
        """When the iteration begins that is not steady, if the next one could at now_s: then, if that one is not."""
        self._stretch = self._next(now_s)
        return now_s if self._stretch is None else self._stretch.starts_s[-1]

    def interrupt(self, now_s: float) -> float | None:
        """A message has come: when the iteration begins that takes it, or None if no stretch is under way. Mutates."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return None
        index = bisect_left(stretch.starts_s, now_s)
        self._take(stretch, index)
        self._most = max(_FEWEST_STEPS, min(2 * index, _MOST_STEPS))
        return stretch.starts_s[index]

    def finish(self) -> None:
        """The last iteration of the stretch is over, if one is under way. Mutates."""
        if self._stretch is not None:
            stretch, self._stretch = self._stretch, None
            self._take(stretch, len(stretch.commits_s))
            self._most = min(2 * self._most, _MOST_STEPS)

    def settle(self, now_s: float) -> None:
        """Bring the state up to the end of the iteration that is under way. Mutates nothing that can be seen."""
        if self._stretch is not None:
            self._take(self._stretch, bisect_left(self._stretch.starts_s, now_s))

    def _next(self, now_s: float) -> _Stretch | None:
        """When the steady steps to come begin and end, if there are some."""
        requests, in_flight = self._scheduler.batch.requests, self._core.in_flight
        if len(in_flight) != self._scheduler.lag or not requests or self._device.is_shared:
            return None
        if in_flight and len(in_flight[0].request_ids) != len(requests):
            return None
        count = self._num_steady(requests)
        if count < 2:
            return None
        steps, lag, deadline_s = self._device.steps, self._scheduler.lag, self._scheduler.next_deadline_s
        num_rows = len(requests)
        num_context = sum(request.prompt_len + request.sequences[0].num_planned for request in requests)
        stretch = _Stretch([now_s], [], [], num_rows)
        pending_s = in_flight[0].end_s if in_flight else 0.0
        free_s = self._device.free_s
        for _ in range(count):
            if deadline_s is not None and now_s >= deadline_s:
                break
            free_s = max(now_s, free_s) + steps.step_s(num_rows, num_context)
            num_context += num_rows
            pending_s, commit_s = (free_s, max(now_s, pending_s)) if lag else (0.0, free_s)
            now_s = commit_s + steps.overhead_s
            stretch.commits_s.append(commit_s)
            stretch.device_free_s.append(free_s)
            stretch.starts_s.append(now_s)
        return stretch

    def _num_steady(self, requests: tuple[Request, ...]) -> int:
        running = [self._calls.by_id[request.request_id] for request in requests]
        if any(attempt.last_token_s != self._calls.last_commit_s for attempt in running):
            return 0
        # A token that ends somebody is not steady.
        until_end = min(a.output_len - r.sequences[0].num_known for a, r in zip(running, requests, strict=True))
        return num_steady_steps(self._scheduler, min(until_end - 1, self._most))

    def _take(self, stretch: _Stretch, until: int) -> None:
        """Bring the state up to before iteration `until`. Mutates."""
        count = until - stretch.num_taken
        if count <= 0:
            return
        take_steady_steps(self._scheduler, count)
        self._calls.steps_passed(stretch.commits_s[stretch.num_taken : until])
        self._device.steps_passed(count, stretch.num_rows, stretch.device_free_s[until - 1])
        stretch.num_taken = until
        if self._core.in_flight:
            (step,) = self._core.in_flight
            step.step_id, step.end_s = step.step_id + count, self._device.free_s
        counts = self._device.counts
        counts.busy_s += stretch.starts_s[until] - stretch.starts_s[until - count]
        counts.num_skipped_steps += count
