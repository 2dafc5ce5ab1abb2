"""A decode replica on the simulated clock. Steady steps are taken many at once; the result is the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.simulation.client import Attempt
from cluster.simulation.event_queue import Action, Order
from cluster.simulation.gap_histogram import GapHistogram
from cluster.simulation.simulated_engine import SimulatedEngine, StepInFlight
from replicas.messages import EngineLoad
from scheduler.engine_core import Turn
from scheduler.outcome import TokenEvent
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.request import RequestState
from scheduler.steady_steps import num_steady_steps, take_steady_steps

_MOST_STEADY_STEPS = 512
_FEWEST_STEADY_STEPS = 8


@dataclass(slots=True)
class SimulatedFrame:
    """What one iteration tells the routers. first_tokens: of prompts computed here, and when they left."""

    load: EngineLoad | None = None
    admitted: list[Attempt] = field(default_factory=list)
    first_tokens: list[Attempt] = field(default_factory=list)
    finished: list[Attempt] = field(default_factory=list)
    evicted: list[Attempt] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.load is None and not (self.admitted or self.first_tokens or self.finished or self.evicted)


@dataclass(slots=True)
class _Stretch:
    """Steady iterations that are under way. starts_s[i]: of iteration i, and behind the last one the next's."""

    starts_s: list[float]
    commits_s: list[float]
    device_free_s: list[float]  # behind iteration i
    num_rows: int
    num_taken: int = 0  # of which the state knows already


class SimulatedDecode(SimulatedEngine):
    """on_frame(frame, now_s): what leaves for the routers now. on_gone(attempt, now_s): a handoff found nobody."""

    pool = "decode"
    on_frame: Callable[[SimulatedFrame, float], None]
    on_load_ended: Callable[[Attempt, float], None]
    may_skip = True  # take steady steps many at once

    def prepare(self) -> None:
        """Before the first event."""
        self.gaps = GapHistogram()
        self.num_skipped_steps = 0
        self._frame = SimulatedFrame()
        self._reads_end_s: dict[str, float] = {}  # of those from each prefill replica
        self._last_load = self.load()
        self._last_commit_s = 0.0
        self._stretch: _Stretch | None = None
        self._most_steady = _FEWEST_STEADY_STEPS

    # -- messages, taken within an iteration -------------------------------------------------------

    def submit(self, attempt: Attempt, deadline_s: float, now_s: float) -> None:
        """A call has come."""
        self.attempts[attempt.request_id] = attempt
        self.scheduler.submit(attempt.request(deadline_s, local_prefill=attempt.is_local), now_s)

    def cancel(self, request_id: str, now_s: float) -> None:
        """The router has gone."""
        self.scheduler.end(request_id, RequestState.CANCELLED, now_s)

    def handoff(self, attempt: Attempt, now_s: float) -> None:
        """The source has the KV: read it, unless nobody wants it any more."""
        if self.scheduler.get(attempt.request_id) is None:
            self.on_load_ended(attempt, now_s)
            return
        self.scheduler.begin_load(attempt.request_id, now_s)
        source = attempt.route.prefill_id
        assert source is not None
        # In order of arrival, as replicas.kv.transfer_reads.
        end_s = max(now_s, self._reads_end_s.get(source, 0.0)) + self.costs.read_s(attempt.prompt_len)
        self._reads_end_s[source] = end_s
        self._queue_message(end_s, lambda at_s: self._read_ended(attempt, at_s))

    def _read_ended(self, attempt: Attempt, now_s: float) -> None:
        self.on_load_ended(attempt, now_s)
        self.post(now_s, lambda at_s: self._kv_ready(attempt, at_s))

    def _kv_ready(self, attempt: Attempt, now_s: float) -> None:
        if self.scheduler.get(attempt.request_id) is None:
            self.scheduler.transfer_ended(attempt.request_id)
        else:
            self.scheduler.kv_ready(attempt.request_id, {0: (attempt.token(0), None)}, now_s)

    def _queue_message(self, time_s: float, action: Action) -> None:
        self._queue.at(time_s, Order.MESSAGE, self.key, action)

    # -- one iteration -----------------------------------------------------------------------------

    def _on_turn(self, turn: Turn) -> None:
        self._frame.admitted += [self.attempts[request.request_id] for request in turn.admitted]
        self._frame.evicted += [self.attempts[request.request_id] for request in turn.evicted]

    def _goes_on(self, plan: StepPlan) -> bool:
        return True  # that all rows end with one step is rare

    def _output(self, step: StepInFlight) -> StepOutput:
        tokens = []
        for request_id in step.request_ids:
            request = self.scheduler.get(request_id)
            num_known = request.sequences[0].num_known if request is not None else 0
            tokens.append(SampledToken(request_id, 0, self.attempts[request_id].token(num_known)))
        return StepOutput(step.step_id, tuple(tokens))

    def _take(self, output: StepOutput, now_s: float) -> None:
        for event in self.core.commit(output, now_s).tokens:
            self._count(event, now_s)
        self._last_commit_s = now_s

    def _count(self, event: TokenEvent, now_s: float) -> None:
        attempt = self.attempts[event.request_id]
        if event.index == 0:
            self._frame.first_tokens.append(attempt)
        if attempt.client.num_tokens + attempt.num_tokens:
            self.gaps.add(now_s - attempt.last_token_s)
        attempt.num_tokens += 1
        attempt.last_token_s = now_s
        attempt.has_moved = True
        if event.finish_reason is not None:
            self._frame.finished.append(attempt)

    def _flush(self, now_s: float) -> None:
        load = self.load()
        if load != self._last_load:
            self._last_load = self._frame.load = load
        if not self._frame.is_empty:
            frame, self._frame = self._frame, SimulatedFrame()
            self.on_frame(frame, now_s)

    # -- steady steps ------------------------------------------------------------------------------

    def post(self, now_s: float, action: Action) -> None:
        """A message ends a stretch of steady steps: the next iteration takes it."""
        stretch = self._stretch
        if stretch is not None:
            index = bisect_left(stretch.starts_s, now_s)
            self._take_stretch(stretch, index)
            self._stretch = None
            self._most_steady = max(_FEWEST_STEADY_STEPS, min(2 * index, _MOST_STEADY_STEPS))
            self._wake_at(stretch.starts_s[index])
        super().post(now_s, action)

    def settle(self, now_s: float) -> None:
        if self._stretch is not None:
            self._take_stretch(self._stretch, bisect_left(self._stretch.starts_s, now_s))

    def _iterate(self, begin_s: float) -> None:
        if self._stretch is not None:
            stretch, self._stretch = self._stretch, None
            self._take_stretch(stretch, len(stretch.commits_s))
            self._most_steady = min(2 * self._most_steady, _MOST_STEADY_STEPS)
        super()._iterate(begin_s)

    def _go_on(self, next_s: float) -> None:
        if self.may_skip and not self._inbox:
            self._stretch = self._steady_stretch(next_s)
            if self._stretch is not None:
                next_s = self._stretch.starts_s[-1]
        self._wake_at(next_s)

    def _steady_stretch(self, now_s: float) -> _Stretch | None:
        """When the steady steps to come begin and end, if there are some."""
        requests = self.scheduler.batch.requests
        if len(self.core.in_flight) != self.scheduler.lag or not requests or self.costs.is_shared:
            return None
        running = [self.attempts[request.request_id] for request in requests]
        if any(attempt.last_token_s != self._last_commit_s for attempt in running):
            return None
        if self.core.in_flight and len(self.core.in_flight[0].request_ids) != len(requests):
            return None
        # A token that ends somebody is not steady.
        until_end = min(a.output_len - r.sequences[0].num_known for a, r in zip(running, requests, strict=True))
        count = num_steady_steps(self.scheduler, self.scheduler.lag, min(until_end - 1, self._most_steady))
        if count < 2:
            return None
        deadline_s = self.scheduler.next_deadline_s
        num_rows = len(requests)
        num_context = sum(request.prompt_len + request.sequences[0].num_planned for request in requests)
        stretch = _Stretch([now_s], [], [], num_rows)
        pending_s = self.core.in_flight[0].end_s if self.core.in_flight else 0.0
        free_s = self._device_free_s
        for _ in range(count):
            if deadline_s is not None and now_s >= deadline_s:
                break
            free_s = max(now_s, free_s) + self.steps.step_s(num_rows, num_context)
            num_context += num_rows
            pending_s, commit_s = (free_s, max(now_s, pending_s)) if self.scheduler.lag else (0.0, free_s)
            now_s = commit_s + self.steps.overhead_s
            stretch.commits_s.append(commit_s)
            stretch.device_free_s.append(free_s)
            stretch.starts_s.append(now_s)
        return stretch

    def _take_stretch(self, stretch: _Stretch, until: int) -> None:
        """Bring the state up to before iteration `until`. Mutates."""
        count = until - stretch.num_taken
        if count <= 0:
            return
        take_steady_steps(self.scheduler, count)
        commits_s = stretch.commits_s[stretch.num_taken : until]
        for before_s, after_s in pairwise([self._last_commit_s, *commits_s]):
            self.gaps.add(after_s - before_s, stretch.num_rows)
        stretch.num_taken = until
        self._last_commit_s = commits_s[-1]
        for request in self.scheduler.batch.requests:
            attempt = self.attempts[request.request_id]
            attempt.num_tokens += count
            attempt.last_token_s = self._last_commit_s
        self.counts.busy_s += stretch.starts_s[until] - stretch.starts_s[until - count]
        self._device_free_s = stretch.device_free_s[until - 1]
        if self.core.in_flight:
            (step,) = self.core.in_flight
            step.step_id, step.end_s = step.step_id + count, self._device_free_s
        self.counts.num_steps += count
        self.counts.num_rows += count * stretch.num_rows
        self.num_skipped_steps += count
