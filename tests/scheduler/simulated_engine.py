"""An engine loop around a scheduler and the paged model, which checks everything after every move.

The loop is that of replicas.engine. A launched step may run at any time until its tokens are wanted, as on a
GPU, while transfers go on beside it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from scheduler.block_allocator import BlockCounts
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.engine_scheduler import EngineScheduler
from scheduler.outcome import Ledger, PromptDone, TokenEvent
from scheduler.plan import StepOutput, StepPlan
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import TERMINAL_STATES, Request, RequestState
from tests.scheduler.paged_model import PagedRunner
from tests.scheduler.short_requests import works_on

_ACTIVE = (RequestState.ADMITTED, RequestState.PREFILLING, RequestState.LOADING, RequestState.RUNNING)

SchedulerT = TypeVar("SchedulerT", PrefillScheduler, DecodeScheduler)


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    block_ids: frozenset[int]  # read or written by it
    output: StepOutput | None = None


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Chance per step that one of its requests fails in it, gives no number, or that the whole engine fails."""

    row_error: float = 0.0
    not_a_number: float = 0.0
    engine: float = 0.0


class SimulatedEngine(Generic[SchedulerT]):
    """`on_event` hears what commits report, `on_end` of requests that the engine itself ended early."""

    def __init__(
        self,
        scheduler: SchedulerT,
        max_blocks: int,
        lag: int,
        rng: random.Random,
        faults: FaultRates,
        on_event: Callable[[TokenEvent | PromptDone], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self.runner = PagedRunner(scheduler.limits, max_blocks)
        self.num_steps = self.num_rows = self.num_sampled = 0
        self._lag, self._rng, self._faults, self._on_event, self._on_end = lag, rng, faults, on_event, on_end
        self._in_flight: deque[_Step] = deque()
        self._waiting: list[str] = []  # in order of arrival
        self._prompt_progress: dict[str, int] = {}
        self.baseline = scheduler.ledger()

    # -- events ------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        """Raises what the scheduler raises."""
        self.scheduler.submit(request, now_s)
        self._waiting.append(request.request_id)
        self.check()

    def end(self, request_id: str, state: RequestState, now_s: float) -> bool:
        was_live = self.scheduler.get(request_id) is not None
        ended = self.scheduler.end(request_id, state, now_s)
        assert ended == was_live
        assert self.scheduler.get(request_id) is None
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        self.check()
        return ended

    def iterate(self, now_s: float) -> tuple[Request, ...]:
        """One round of the loop; who was admitted."""
        for request_id in self.scheduler.expired(now_s):
            self._expire(request_id, now_s)
        for request in self.scheduler._requests.values():
            assert request.is_over or request.deadline_s > now_s or request.state is RequestState.LEASED
        admitted = self._admit(now_s)
        if self._rng.random() < self._faults.engine:
            self._fail(now_s)
            return admitted
        plan = self.scheduler.plan(now_s)
        if plan is not None:
            self._launch(plan, now_s)
            self.check()
        while self._in_flight and (plan is None or len(self._in_flight) > self._lag):
            self._commit(now_s)
        return admitted

    def run_some(self) -> None:
        """The device gets round to some of the steps in flight."""
        for step in list(self._in_flight)[: self._rng.randint(0, len(self._in_flight))]:
            self._run(step)

    # -- the loop ----------------------------------------------------------------------------------

    def _expire(self, request_id: str, now_s: float) -> None:
        request = self.scheduler.get(request_id)
        assert request is not None, f"{request_id} is over, yet its time is up"
        assert request.deadline_s <= now_s, f"{request_id} ended before its time"
        if request.state is not RequestState.LEASED:
            self.end(request_id, RequestState.FAILED, now_s)
        self._on_end(request_id)

    def _admit(self, now_s: float) -> tuple[Request, ...]:
        admitted: tuple[Request, ...] = self.scheduler.admit(now_s)
        names = [request.request_id for request in admitted]
        assert names == self._waiting[: len(names)], "not first come first served"
        del self._waiting[: len(names)]
        if self._waiting:
            head = self.scheduler.get(self._waiting[0])
            assert head is not None
            blocks, slots = needs_of(self.scheduler, head)
            free_slots = self.scheduler.limits.max_sequences - self.scheduler.num_running
            assert blocks > self.scheduler.budget.available or slots > free_slots, "the head would have fitted"
        if admitted:
            self.check()
        return admitted

    def _launch(self, plan: StepPlan, now_s: float) -> None:
        self._check_plan(plan)
        block_ids = {block_id for copy in plan.copies for block_id in (copy.source, copy.destination)}
        for request_id in works_on(plan):
            request = self.scheduler.get(request_id)
            assert request is not None, f"{request_id} is over and planned"
            block_ids.update(block_id for sequence in request.sequences for block_id in sequence.block_ids)
        victim = self._victim(plan, self._faults.row_error)
        if victim is not None:  # as replicas.step_isolation: the rest of the step runs
            rows = tuple(row for row in plan.rows if row.request_id != victim)
            chunks = tuple(chunk for chunk in plan.chunks if chunk.request_id != victim)
            plan = replace(plan, rows=rows, chunks=chunks)
        self._in_flight.append(_Step(plan, frozenset(block_ids)))
        self.num_steps += 1
        self.num_rows += len(plan.rows)
        if victim is not None:
            self.end(victim, RequestState.FAILED, now_s)
            self._on_end(victim)

    def _run(self, step: _Step) -> None:
        if step.output is None:
            step.output = self.runner.run(step.plan)

    def _commit(self, now_s: float) -> None:
        step = self._in_flight.popleft()
        self._run(step)
        assert step.output is not None
        output = step.output
        victim = self._victim(step.plan, self._faults.not_a_number)
        if victim is not None and self.scheduler.get(victim) is not None:
            self._in_flight.appendleft(step)  # it has not been committed yet
            self.end(victim, RequestState.FAILED, now_s)
            self._in_flight.popleft()
            self._on_end(victim)
            output = replace(output, tokens=tuple(token for token in output.tokens if token.request_id != victim))
        self.num_sampled += len(output.tokens)
        for event in self.scheduler.commit(output, now_s):
            self._on_event(event)
        self.check()

    def _victim(self, plan: StepPlan, rate: float) -> str | None:
        if plan.is_empty or self._rng.random() >= rate:
            return None
        return self._rng.choice(works_on(plan))

    def _fail(self, now_s: float) -> None:
        """As replicas.engine after an exception anywhere, sometimes in the middle of a plan."""
        if isinstance(self.scheduler, DecodeScheduler) and self._rng.random() < 0.7:
            self.scheduler.batch.plan_rows(self.scheduler.builder.next_step_id)
        for step in self._in_flight:
            self._run(step)
        self._in_flight.clear()
        self.scheduler.steps_abandoned()
        for request in list(self.scheduler._requests.values()):
            if request.state is not RequestState.LEASED and not request.is_over:
                self.end(request.request_id, RequestState.FAILED, now_s)
                self._on_end(request.request_id)
        assert self.scheduler.ledger().used_slots == 0, "something waits for a step that was abandoned"

    # -- checks ------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        num_tokens = len(plan.rows) + plan.num_prefill_tokens
        assert not plan.is_empty
        assert num_tokens <= scheduler.limits.max_step_tokens, "over the token budget"
        assert len({(row.request_id, row.choice) for row in plan.rows}) == len(plan.rows), "two rows of one sequence"
        owners = Counter(
            block_id
            for request in scheduler._requests.values()
            for sequence in request.sequences
            for block_id in sequence.block_ids
        )
        being_read = {block_id for block_ids in scheduler._transfers.values() for block_id in block_ids}
        for row in plan.rows:
            request = scheduler.get(row.request_id)
            assert request is not None
            (sequence,) = [sequence for sequence in request.sequences if sequence.choice == row.choice]
            assert sequence.slot == row.slot
            assert sequence.finish_reason is None
            written = sequence.block_ids[row.position // scheduler.limits.block_size]
            assert owners[written] == 1, f"{row} writes block {written}, which others see"
            assert written not in being_read, f"{row} writes block {written}, which a transfer holds"
        for chunk in plan.chunks:
            request = scheduler.get(chunk.request_id)
            assert request is not None
            assert chunk.start == self._prompt_progress.get(chunk.request_id, 0), "a gap or an overlap in a prompt"
            end = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids == request.prompt_ids[chunk.start : end] != ()
            self._prompt_progress[chunk.request_id] = end
            choices = tuple(target.choice for target in chunk.targets)
            assert choices == (request.choices if end == request.prompt_len else ())

    def check(self) -> None:
        """Everything that must hold at any time, recounted from nothing. O(blocks + requests)."""
        scheduler = self.scheduler
        scheduler.allocator.check_integrity()
        held: list[int] = []
        in_transfer: list[int] = []
        slots = list(scheduler._free_slots)
        states = [request.state for request in scheduler._requests.values()]
        num_over = sum(states.count(state) for state in TERMINAL_STATES)
        num_unplanned = 0
        for request in scheduler._requests.values():
            own = [block_id for sequence in request.sequences for block_id in sequence.block_ids]
            held += own
            in_transfer += scheduler._transfers.get(request.request_id, ())
            slots += [sequence.slot for sequence in request.sequences]
            is_over = request.is_over
            if request.local_prefill and not is_over:
                num_unplanned += request.prompt_len - request.num_prefilled
            self._check_promise(request, own, is_over)
        assert scheduler.allocator._request_refs == Counter(held)
        assert scheduler.allocator._transfer_refs == Counter(in_transfer)
        assert scheduler._transfers.keys() <= scheduler._requests.keys()
        assert sorted(slots) == list(range(scheduler.limits.max_sequences))
        assert list(scheduler._queue) == self._waiting
        assert len(scheduler._deadlines) <= len(scheduler._requests) - num_over
        promised = scheduler.budget._promised
        assert promised.keys() == scheduler._requests.keys() - scheduler._queue.keys()
        assert sum(promised.values()) <= scheduler.limits.num_blocks
        free = set(scheduler.allocator._free)
        for step in self._in_flight:
            assert step.block_ids.isdisjoint(free), f"step {step.plan.step_id} in flight computes on freed blocks"
        assert scheduler.ledger() == Ledger(
            blocks=BlockCounts(scheduler.limits.num_blocks, len(free), len(set(held)), len({*in_transfer} - {*held})),
            promised_blocks=sum(promised.values()),
            budget_blocks=scheduler.limits.num_blocks,
            num_queued=states.count(RequestState.QUEUED),
            queued_prompt_tokens=num_unplanned,
            num_active=sum(states.count(state) for state in _ACTIVE),
            num_leased=states.count(RequestState.LEASED),
            num_ending=num_over,
            used_slots=len(slots) - len(scheduler._free_slots),
        )

    def _check_promise(self, request: Request, own: list[int], is_over: bool) -> None:
        num_promised = self.scheduler.budget._promised.get(request.request_id, 0)
        in_transfer: tuple[int, ...] = self.scheduler._transfers.get(request.request_id, ())
        num_held = len({*own, *in_transfer})
        assert num_held <= num_promised, f"{request.request_id} holds {num_held} blocks, {num_promised} promised"
        if is_over and not own:
            assert num_promised == len(in_transfer), f"{request.request_id} keeps a promise it cannot use"

    def check_at_rest(self) -> None:
        """Nothing is left of anything."""
        assert not self._in_flight
        assert self.scheduler.ledger() == self.baseline
        assert not self.scheduler._requests
        assert not self.scheduler._ending
        assert len(self.scheduler._deadlines) == len(self.scheduler.prompts) == 0
        assert self.scheduler.next_deadline_s is None


def needs_of(scheduler: EngineScheduler, request: Request) -> tuple[int, int]:
    """Blocks and slots."""
    slots = len(request.choices) if isinstance(scheduler, DecodeScheduler) else 1
    return scheduler.blocks_needed(request), slots
