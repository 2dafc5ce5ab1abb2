"""An engine loop around a scheduler and the paged model, which checks everything after every move.

The loop is the engine's (scheduler.engine_core), looked at between the parts of a turn. A launched step may run at any
time until its tokens are wanted, as on a GPU, while transfers go on beside it. With two lanes, also long before or
behind any step of the other lane.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler.admission import ProjectedBudget
from scheduler.block_allocator import BlockCounts
from scheduler.engine_core import EngineCore, Turn
from scheduler.generated_token import Token
from scheduler.lane import Lane
from scheduler.memory_budget import MemoryBudget, num_blocks_for
from scheduler.outcome import Ledger, PromptDone, PromptPart
from scheduler.plan import StepOutput, StepPlan
from scheduler.request import TERMINAL_STATES, Request, RequestState, Sequence
from scheduler.scheduler import Scheduler
from scheduler.two_lane_core import TwoLaneCore
from tests.scheduler.brute_cache import BruteCache
from tests.scheduler.brute_projection import check_projection
from tests.scheduler.brute_queue import BruteQueue
from tests.scheduler.paged_model import OracleDrafts, PagedRunner
from tests.scheduler.short_requests import works_on

_ACTIVE = (
    RequestState.ADMITTED,
    RequestState.PREFILLING,
    RequestState.LOADING,
    RequestState.RUNNING,
    RequestState.PREEMPTED,
)


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    block_ids: frozenset[int]  # read or written by it
    host_ids: frozenset[int]
    output: StepOutput | None = None


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Chance per step that one of its requests fails in it, gives no number, or that the whole engine fails."""

    row_error: float = 0.0
    not_a_number: float = 0.0
    engine: float = 0.0


class _EngineFails(Exception):
    """Stands for a bug somewhere in the loop."""


class _Checks(EngineCore[_Step]):
    """Looks at everything between the parts of a turn."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine.scheduler)
        self._engine = engine

    def _expire(self, now_s: float) -> tuple[str, ...]:
        live = {rid: request for rid, request in self.scheduler._requests.items() if not request.is_over}
        expired = super()._expire(now_s)
        self._engine.on_expired([(request_id, live.get(request_id)) for request_id in expired], now_s)
        return expired

    def _admit(self, now_s: float) -> tuple[Request, ...]:
        waiting = self._engine.waiting_ids()
        admitted = super()._admit(now_s)
        self._engine.on_admitted(waiting, admitted)
        return admitted

    def _plan(self, now_s: float) -> StepPlan | None:
        if self._engine.fails_now():
            raise _EngineFails
        return super()._plan(now_s)


class _CheckedCore(_Checks, EngineCore[_Step]):
    pass


class _CheckedTwoLanes(_Checks, TwoLaneCore[_Step]):
    def _plan_prompts(self, now_s: float) -> StepPlan | None:
        if self._engine.fails_now():
            raise _EngineFails
        return super()._plan_prompts(now_s)


class SimulatedEngine:
    """`on_event` hears what commits report, `on_end` of requests that the engine itself ended early."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_blocks: int,
        rng: random.Random,
        faults: FaultRates,
        on_event: Callable[[Token | PromptPart | PromptDone], None],
        on_end: Callable[[str], None],
        drafts: OracleDrafts | None = None,
    ) -> None:
        self.scheduler, self.drafts = scheduler, drafts
        self.runner = PagedRunner(scheduler.limits, max_blocks, scheduler.preemption.num_host_blocks, drafts)
        self.cache = BruteCache(scheduler, self.runner)
        self._admitted_at: dict[str, int] = {}  # the step that came next
        self.num_steps = self.num_rows = self.num_sampled = 0
        self.num_beam_rows = self.num_beam_prompts = 0  # whose candidates were taken
        self.num_beams_swapped = 0  # plans in which a search was out of memory's way
        self._rng, self._faults, self._on_event, self._on_end = rng, faults, on_event, on_end
        self._core = _CheckedTwoLanes(self) if scheduler.has_two_lanes else _CheckedCore(self)
        self._num_turns = 0
        self.num_given_back = 0  # blocks
        self._is_failing = False
        self.num_ahead = 0  # steps that ran though one of the other lane was launched before
        self.num_overtaken: Counter[str] = Counter()
        self.num_tried = self.num_suspects = 0  # at the last turn; over all turns
        self.num_harmless = 0  # passings that took nothing from anybody
        self._waiting = BruteQueue()
        self._prompt_progress: dict[str, int] = {}
        self._admitted: tuple[Request, ...] = ()  # in this round
        self.baseline = scheduler.ledger()

    # -- events ------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        """Raises what the scheduler raises."""
        self.scheduler.submit(request, now_s)
        self._waiting.add(request, self.scheduler._cost(request))
        self.check()

    def end(self, request_id: str, state: RequestState, now_s: float) -> bool:
        was_live = self.scheduler.get(request_id) is not None
        ended = self.scheduler.end(request_id, state, now_s)
        assert ended == was_live
        assert self.scheduler.get(request_id) is None
        self._waiting.remove(request_id, taken=False)
        self.check()
        return ended

    def _turn(self, now_s: float) -> Turn:
        """With two lanes rows may have to wait for who becomes one."""
        if isinstance(self._core, TwoLaneCore):
            self._num_turns += 1
            return self._core.turn(now_s, rows_step_s=3.0 * (self._num_turns % 3 > 0))
        return self._core.turn(now_s)

    def iterate(self, now_s: float) -> tuple[Request, ...]:
        """One round of the loop; who was admitted."""
        self._admitted = ()
        try:
            turn = self._turn(now_s)
        except _EngineFails:
            self._fail(now_s)
            return self._admitted
        for request in turn.evicted:  # to their clients this is a failure that their router would make good
            assert request.state is RequestState.EVICTED
            self._on_end(request.request_id)
        if turn.plan is not None:
            self._launch(turn.plan, now_s, self._core.launched)
            self.check()
        if isinstance(self._core, TwoLaneCore):
            self._iterate_lanes(self._core, turn, now_s)
        else:
            for step in self._core.due(turn):
                self._core.in_flight.appendleft(step)  # until its tokens are read
                self._commit(step, now_s)
        assert turn.admitted == self._admitted
        return turn.admitted

    def _iterate_lanes(self, core: TwoLaneCore[_Step], turn: Turn, now_s: float) -> None:
        if turn.prompts is not None:
            assert not turn.prompts.rows
            assert not turn.prompts.swap_outs + turn.prompts.swap_ins
            assert not turn.prompts.fetches + turn.prompts.saves
            self._launch(turn.prompts, now_s, core.prefill_launched)
            self.check()
        assert turn.plan is None or not turn.plan.chunks
        for steps in self._rng.sample(self._lanes, 2):
            num_ready = self._rng.randint(0, len(steps))
            for step in list(steps)[:num_ready]:
                self._commit(step, now_s)

    @property
    def _lanes(self) -> list[deque[_Step]]:
        core = self._core
        return [core.in_flight, core.prompts_in_flight] if isinstance(core, TwoLaneCore) else [core.in_flight]

    @property
    def _in_flight(self) -> list[_Step]:
        return [step for steps in self._lanes for step in steps]

    def run_some(self) -> None:
        """The device gets round to some of the steps in flight."""
        for steps in self._lanes:
            for step in list(steps)[: self._rng.randint(0, len(steps))]:
                self._run(step)

    # -- the loop ----------------------------------------------------------------------------------

    def on_expired(self, expired: list[tuple[str, Request | None]], now_s: float) -> None:
        """expired: each as it was before."""
        for request_id, request in expired:
            assert request is not None, f"{request_id} was over, yet its time is up"
            assert request.deadline_s <= now_s, f"{request_id} ended before its time"
            assert request.state in (RequestState.FAILED, RequestState.LEASED)
            if request.state is RequestState.FAILED:
                assert self.scheduler.get(request_id) is None
                self._waiting.remove(request_id, taken=False)
        if expired:
            self.check()
        for request_id, _ in expired:
            self._on_end(request_id)
        for request in self.scheduler._requests.values():
            assert request.is_over or request.deadline_s > now_s or request.state is RequestState.LEASED

    def waiting_ids(self) -> list[str]:
        """In the order in which their turn is."""
        return self._waiting.ids()

    def on_admitted(self, waiting: list[str], admitted: tuple[Request, ...]) -> None:
        """waiting: who waited before."""
        self._admitted = admitted
        for request in admitted:
            index = waiting.index(request.request_id)
            for place in range(index):
                self._overtaken(request, waiting[: place + 1])
            del waiting[index]
            self._waiting.remove(request.request_id, taken=True)
            self._admitted_at[request.request_id] = self.scheduler.builder.next_step_id
            self.cache.check_found(request)
        assert all(count <= self.scheduler._max_overtakes for count in self.num_overtaken.values()), "it starves"
        suspects = [r for r in self.scheduler._requests.values() if r.is_suspect and r.sequences and not r.is_over]
        self.num_tried = sum(max(sequence.num_known for sequence in r.sequences) < 2 for r in suspects)
        assert self.num_tried <= 1, "two suspects beside each other"
        self.num_suspects += self.num_tried
        if waiting:
            self._check_head(waiting[0])
        if admitted:
            self.check()
        if isinstance(self.scheduler.budget, ProjectedBudget):
            check_projection(self.scheduler, self._admitted_at)

    def _overtaken(self, request: Request, in_front: list[str]) -> None:
        """The last of those in front is. It counts unless the request, however long it gets, is over before that one is
        expected to start, or before another is that it must not pass."""
        *others, waiting = [self.scheduler._requests[request_id] for request_id in in_front]
        if waiting.is_suspect:
            return
        most = self.scheduler._max_overtakes
        kept = [of for of in others if self.num_overtaken[of.request_id] >= most or of.has_begun > waiting.has_begun]
        ends_at = self.scheduler.builder.next_step_id + request.spec.max_tokens - 1
        if any(of.starts_at is not None and ends_at < of.starts_at for of in (waiting, *kept)):
            self.num_harmless += 1
            return
        assert request.has_begun or not waiting.has_begun, "who has begun goes before newcomers"
        self.num_overtaken[waiting.request_id] += 1

    def fails_now(self) -> bool:
        """Whether the engine fails at this turn, sometimes in the middle of a plan."""
        if self._rng.random() >= self._faults.engine:
            return False
        if self.scheduler.capabilities.decodes and self._rng.random() < 0.7:
            scheduler = self.scheduler
            scheduler.batch.plan_rows(scheduler.builder.next_step_id, scheduler._num_available)
        return True

    def _check_head(self, request_id: str) -> None:
        """The first that waits does so for a reason."""
        scheduler = self.scheduler
        head = scheduler.get(request_id)
        assert head is not None
        if head.is_suspect and self.num_tried:
            return
        blocks, slots = needs_of(scheduler, head)
        if slots > scheduler.limits.max_sequences - scheduler._reserved_from(head)[1] - scheduler.num_running:
            return
        budget = scheduler.budget
        if isinstance(budget, MemoryBudget):
            assert blocks > budget.available, "the head would have fitted"
        elif isinstance(budget, ProjectedBudget) and not scheduler.preemption:
            peak = budget.projection.peak_with(budget.newcomer(head), budget.step)
            limit = budget.num_blocks if head.hands_over else budget.limit
            assert peak > limit - budget.num_shared or budget.estimator, "the head would have fitted"

    def _launch(self, plan: StepPlan, now_s: float, launched: Callable[[_Step], None]) -> None:
        self._check_plan(plan)
        if plan.swap_outs:
            states = [request.state for request in self.scheduler._requests.values() if request.search is not None]
            self.num_beams_swapped += states.count(RequestState.PREEMPTED)
        block_ids = {block_id for copy in plan.copies for block_id in (copy.source, copy.destination)}
        block_ids.update(swap.device for swap in plan.swap_outs + plan.swap_ins + plan.fetches)
        self.cache.damaged.difference_update(swap.host for swap in plan.swap_outs + plan.saves)
        host_ids = frozenset(swap.host for swap in plan.swap_outs + plan.swap_ins)
        for request_id in works_on(plan):
            request = self.scheduler.get(request_id)
            assert request is not None, f"{request_id} is over and planned"
            block_ids.update(block_id for sequence in request.sequences for block_id in sequence.block_ids)
        victim = self._victim(plan, self._faults.row_error)
        if victim is not None:  # as replicas.engine.step_isolation: the rest of the step runs
            plan = replace(plan, slices=tuple(part for part in plan.slices if part.request_id != victim))
        launched(_Step(plan, frozenset(block_ids), host_ids))
        self.num_steps += 1
        self.num_rows += plan.num_rows
        if victim is not None:
            self.end(victim, RequestState.FAILED, now_s)
            self._on_end(victim)

    def _run(self, step: _Step) -> None:
        if step.output is None:
            older = self._in_flight[: self._in_flight.index(step)] if self.scheduler.has_two_lanes else []
            self.num_ahead += any(other.output is None for other in older)
            step.output = self.runner.run(step.plan)

    def _commit(self, step: _Step, now_s: float) -> None:
        self._run(step)
        assert step.output is not None
        output = step.output
        victim = self._victim(step.plan, self._faults.not_a_number)
        if victim is not None and self.scheduler.get(victim) is not None:
            self.end(victim, RequestState.FAILED, now_s)
            self._on_end(victim)
            output = replace(output, tokens=tuple(token for token in output.tokens if token.request_id != victim))
        self.num_sampled += len(output.tokens)
        self._count_beams(output)
        before = self._tables(output)
        events = self._core.commit(output, now_s, self._take(step, now_s))
        self._given_back(before)
        for event in (*events.tokens, *events.parts, *events.prompts):
            self._on_event(event)
        self.check()

    def _tables(self, output: StepOutput) -> list[tuple[Request, Sequence, list[int]]]:
        """Of the rows with drafts."""
        rows = [(self.scheduler.get(one.request_id), one.choice) for one in output.accepted]
        return [
            (request, sequence, list(sequence.block_ids))
            for request, choice in rows
            for sequence in (request.sequences if request is not None else ())
            if sequence.choice == choice
        ]

    def _given_back(self, before: list[tuple[Request, Sequence, list[int]]]) -> None:
        """Blocks behind what may be written: the steps in flight may have been planned with them, but will not touch
        them. (If they do, somebody else's text shows it.)"""
        block_size = self.scheduler.limits.block_size
        for request, sequence, table in before:
            if request.is_over or sequence.finish_reason is not None:
                continue
            num_written = request.prompt_len + sequence.num_planned - 1
            assert len(sequence.block_ids) in (0, num_blocks_for(num_written, block_size)), "too many, or too few"
            given_back = frozenset(table[len(sequence.block_ids) :])
            self.num_given_back += len(given_back)
            for step in self._in_flight:
                step.block_ids -= given_back

    def _take(self, step: _Step, now_s: float) -> Lane | None:
        """It is in flight no more; its lane, where there are two."""
        if isinstance(self._core, TwoLaneCore):
            lane = self._core.lane_of(step, now_s)
            assert lane is not None
            return lane
        assert self._core.in_flight.popleft() is step
        return None

    def _count_beams(self, output: StepOutput) -> None:
        for token in output.tokens:
            request = self.scheduler.get(token.request_id)
            if request is not None and request.search is not None:
                is_row = request.sequences[0].num_known > 0
                self.num_beam_rows += is_row
                self.num_beam_prompts += not is_row

    def _victim(self, plan: StepPlan, rate: float) -> str | None:
        if plan.is_empty or self._rng.random() >= rate:
            return None
        return self._rng.choice(works_on(plan))

    def _fail(self, now_s: float) -> None:
        """As replicas.engine.engine after an exception anywhere."""
        for step in self._in_flight:
            self._run(step)
        self._core.abandon()
        self._is_failing = True
        for request in list(self.scheduler._requests.values()):
            if request.state is not RequestState.LEASED and not request.is_over:
                self.end(request.request_id, RequestState.FAILED, now_s)
                self._on_end(request.request_id)
        self._is_failing = False
        self.check()
        assert self.scheduler.ledger().used_slots == 0, "something waits for a step that was abandoned"

    # -- checks ------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        num_tokens = sum(part.num_tokens for part in plan.slices)
        assert not plan.is_empty or plan.swap_outs or plan.swap_ins or plan.fetches or plan.saves
        read = {swap.host for swap in plan.fetches + plan.swap_ins}
        written = {swap.host for swap in plan.saves + plan.swap_outs}
        assert read.isdisjoint(written), "run again, it would read what it wrote"
        assert len({swap.device for swap in plan.fetches + plan.swap_ins}) == len(plan.fetches + plan.swap_ins)
        assert num_tokens <= scheduler.limits.max_step_tokens, "over the token budget"
        assert [part.is_prompt for part in plan.slices] == [False] * plan.num_rows + [True] * len(plan.chunks)
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
            assert request.search is None or request.sequences[0].num_planned == request.search.length + 1
            assert not request.needs_known_tokens or sequence.num_known == row.start - request.prompt_len + 1
            assert row.num_tokens == row.num_sampled == 1 + row.num_drafts
            assert sequence.num_planned <= request.spec.max_tokens, "drafts beyond the end"
            # Where it lies is not known: drafts in flight may count or not.
            earliest = request.prompt_len + sequence.num_planned - sequence.num_unsure - 2
            assert earliest <= row.start
            for place in range(
                earliest // scheduler.limits.block_size, (row.end - 1) // scheduler.limits.block_size + 1
            ):
                written = sequence.block_ids[place]
                assert owners[written] == 1, f"{row} writes block {written}, which others see"
                assert written not in being_read, f"{row} writes block {written}, which a transfer holds"
                assert not self.cache.has_name(written), f"{row} writes block {written}, which others may find"
        for chunk in plan.chunks:
            request = scheduler.get(chunk.request_id)
            assert request is not None
            progress = self._prompt_progress.get(chunk.request_id, request.num_cached)
            assert chunk.start == progress, "a gap or an overlap in a prompt"
            assert chunk.token_ids == request.spec.prompt_ids[chunk.start : chunk.end] != ()
            self._prompt_progress[chunk.request_id] = chunk.end
            places = slice(chunk.start // scheduler.limits.block_size, -(-chunk.end // scheduler.limits.block_size))
            written = set(request.sequences[0].block_ids[places])
            assert being_read.isdisjoint(written), f"{chunk} writes a block which a transfer holds"
            assert chunk.sampled_choices == (request.prompt_choices if chunk.end == request.prompt_len else ())

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
            if isinstance(scheduler.budget, MemoryBudget):
                self._check_promise(scheduler.budget, request, own, is_over)
        self.cache.check()
        num_of_requests = len(set(held))
        if isinstance(scheduler.budget, ProjectedBudget):
            held += [block_id for cooling in scheduler.preemption._cooling for block_id in cooling.device_refs]
            self._check_budget(scheduler.budget, num_of_requests)
        self._check_host(scheduler)
        assert scheduler.allocator._request_refs == Counter(held)
        assert scheduler.allocator._transfer_refs == Counter(in_transfer)
        assert scheduler._transfers.keys() <= scheduler._requests.keys()
        assert sorted(slots) == list(range(scheduler.limits.max_sequences))
        assert [
            request.request_id for queue in scheduler._queues for request in queue.in_order()
        ] == self._waiting.ids()
        assert len(scheduler._deadlines) <= len(scheduler._requests) - num_over
        free = {*scheduler.allocator._free, *self.cache.idle()}
        for step in self._in_flight:
            assert step.block_ids.isdisjoint(free), f"step {step.plan.step_id} in flight computes on freed blocks"
        assert scheduler.ledger() == Ledger(
            blocks=BlockCounts(
                scheduler.limits.num_blocks,
                len(free) - len(self.cache.idle()),
                len(set(held)),
                len({*in_transfer} - {*held}),
                len(self.cache.idle()),
            ),
            promised_blocks=scheduler.budget.promised,
            budget_blocks=scheduler.limits.num_blocks,
            num_queued=states.count(RequestState.QUEUED),
            queued_prompt_tokens=num_unplanned,
            num_active=sum(states.count(state) for state in _ACTIVE),
            num_leased=states.count(RequestState.LEASED),
            num_ending=num_over,
            used_slots=len(slots) - len(scheduler._free_slots),
        )

    def _check_budget(self, budget: ProjectedBudget, num_held: int) -> None:
        """Everybody is in the projection; with bounds instead of estimates it never exceeds the pool."""
        scheduler = self.scheduler
        for request in scheduler.batch.take_moved():  # as whoever decides something next
            if request.state is RequestState.RUNNING:
                budget.running(request, scheduler.builder.next_step_id)
        known = budget.projection._profiles.keys()
        admitted = {rid for rid in scheduler._requests if not any(rid in queue for queue in scheduler._queues)}
        out = {rid for rid, away in scheduler.preemption._away.items() if away.is_out}
        assert known == admitted - out
        assert scheduler._num_available >= 0, "a read that may begin would find no blocks"
        if budget.estimator is None:
            assert num_held <= budget.promised, "somebody holds more than was promised"
            # Who was to be gone by a step that was abandoned stays until it is ended, in a moment.
            assert budget.promised <= scheduler.limits.num_blocks or self._is_failing, "over the budget"
            assert not scheduler.preemption.num_swapped + scheduler.preemption.num_evicted + scheduler.num_stalls

    def _check_host(self, scheduler: Scheduler) -> None:
        preemption = scheduler.preemption
        used = [host_id for away in preemption._away.values() for host_id in away.host_ids]
        used += [host_id for cooling in preemption._cooling for host_id in cooling.host_ids]
        scheduler.host.check_integrity(used)
        for step in self._in_flight:
            assert step.host_ids <= set(used), "a host block in use is somebody else's"

    def _check_promise(self, budget: MemoryBudget, request: Request, own: list[int], is_over: bool) -> None:
        scheduler = self.scheduler
        num_promised = budget._promised.get(request.request_id, 0)
        assert budget._promised.keys() == {rid for rid in scheduler._requests if rid not in scheduler._queue}
        assert budget.promised == sum(budget._promised.values()) + budget.num_shared <= scheduler.limits.num_blocks
        in_transfer: tuple[int, ...] = self.scheduler._transfers.get(request.request_id, ())
        num_held = len({*own, *in_transfer}) - request.num_shared
        assert num_held <= num_promised, f"{request.request_id} holds {num_held} blocks, {num_promised} promised"
        if is_over and not own:
            assert num_promised == num_held, f"{request.request_id} keeps a promise it cannot use"

    def check_at_rest(self) -> None:
        """Nothing is left of anything."""
        assert not self._in_flight
        ledger = self.scheduler.ledger()
        blocks = replace(ledger.blocks, free=ledger.blocks.free + ledger.blocks.cached, cached=0)
        assert replace(ledger, blocks=blocks) == self.baseline
        assert len(self.cache.idle()) == self.cache.num_named, "a block with a name has an owner"
        assert not self.scheduler._requests
        assert not self.scheduler._ending
        preemption = self.scheduler.preemption
        assert preemption.num_host_blocks_used == preemption.num_cooling == len(preemption) == 0
        if isinstance(self.scheduler.budget, ProjectedBudget):
            assert not self.scheduler.budget.projection._profiles
        assert self.scheduler.host_tier is None or not self.scheduler.host_tier.is_busy
        assert not self.scheduler.host_tier or not self.scheduler.host_tier.num_pending_tokens
        assert not self.scheduler._unloaded
        assert not self.scheduler._handing_over
        assert len(self.scheduler._deadlines) == len(self.scheduler.prompts) == 0
        assert self.scheduler.next_deadline_s is None


def needs_of(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """Blocks and slots."""
    slots = 1 if request.hands_over else len(request.spec.choices)
    return scheduler.blocks_needed(request), slots
