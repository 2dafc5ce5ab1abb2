"""Scheduler of a decode engine: admission by projected memory, KV loaded or prefilled here, then the running batch.

When memory runs short all the same (outputs are longer than estimated), the least important request gives way: to
host memory, or, when that is full, by an early end after which its router replays it.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.admission import LATER_STEPS, AdmissionPolicy, ProjectedBudget, num_distinct_blocks
from scheduler.beam_batcher import hypothesis_events
from scheduler.beam_search import Candidate
from scheduler.decode_batcher import DecodeBatcher
from scheduler.engine_scheduler import EngineScheduler, PoolLimits
from scheduler.memory_budget import blocks_for_generation, num_blocks_for
from scheduler.outcome import TokenEvent
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.preemption import Preemption, growth_blocks, importance, num_planned
from scheduler.request import Request, RequestState


class DecodeScheduler(EngineScheduler):
    """lag: steps that may be in flight when one is planned. num_host_blocks: room for blocks of preempted requests."""

    budget: ProjectedBudget

    def __init__(
        self, limits: PoolLimits, admission: AdmissionPolicy | None = None, lag: int = 0, num_host_blocks: int = 0
    ) -> None:
        """Raises ValueError when running sequences alone could fill a step, so that prompts would starve."""
        if limits.max_step_tokens < limits.max_sequences:
            raise ValueError(f"{limits.max_step_tokens} step tokens for {limits.max_sequences} sequences")
        admission = admission or AdmissionPolicy()
        budget = ProjectedBudget(limits.num_blocks, limits.block_size, admission, lag)
        super().__init__(limits, budget, admission.max_overtakes)
        self.batch = DecodeBatcher(self.allocator, self.builder, limits.block_size)
        self.preemption = Preemption(self.allocator, self.builder, limits.block_size, num_host_blocks)
        self.num_stalls = 0  # times that a request had to wait a step for a free block
        self._unloaded: dict[str, int] = {}  # prompt blocks of admitted requests that are kept free for their read
        self._evicted: list[Request] = []

    def blocks_needed(self, request: Request) -> int:
        return blocks_for_generation(
            request.prompt_len, request.max_tokens, len(request.choices), self.limits.block_size
        )

    def admit(self, now_s: float) -> tuple[Request, ...]:
        self._project_from_now()
        return super().admit(now_s)

    def _promise(self, request: Request) -> bool:
        if self.preemption:
            return False  # who gave way comes back first
        num_prompt_blocks = num_blocks_for(request.prompt_len, self.limits.block_size)
        is_there = num_prompt_blocks <= self._num_available - self.preemption.num_protected_blocks()
        return is_there and self.budget.promise(request)

    def free_blocks(self) -> int:
        return 0 if self.preemption else self.budget.free_from(0)

    def later_free_blocks(self) -> tuple[int, ...]:
        return tuple(0 if self.preemption else self.budget.free_from(num_steps) for num_steps in LATER_STEPS)

    @property
    def expected_tokens(self) -> int | None:
        return self.budget.expected_tokens

    def _slots_needed(self, request: Request) -> int:
        return len(request.choices)

    def _cost(self, request: Request) -> int:
        length = min(request.max_tokens, self.expected_tokens or request.max_tokens)
        return request.prompt_len + len(request.choices) * length

    def _on_admitted(self, request: Request) -> None:
        if request.local_prefill:
            self._allocate_prompt(request)
            for sequence in request.sequences:
                self.builder.init_slot(request.slot_init(sequence))
            self.builder.write_table(request.sequences[0].slot, 0, tuple(request.sequences[0].block_ids))
            self.prompts.add(request)
        else:
            self._unloaded[request.request_id] = num_blocks_for(request.prompt_len, self.limits.block_size)

    # -- KV that comes from a source ---------------------------------------------------------------

    def begin_load(self, request_id: str, now_s: float) -> tuple[int, ...]:
        """Allocate the prompt's blocks and hold them for the read; the ids, in prompt order. Mutates."""
        request = self._requests[request_id]
        request.enter(RequestState.LOADING, now_s)
        del self._unloaded[request_id]
        block_ids = self._allocate_prompt(request)
        self._hold(request_id, block_ids)
        return block_ids

    def kv_ready(self, request_id: str, first_tokens: Mapping[int, tuple[int, str | None]], now_s: float) -> None:
        """The KV is here and confirmed: join the running batch. Mutates.

        first_tokens: choice -> (token id, finish reason or None), as the source sampled them; raises ValueError
        unless they are one for each choice with something left to generate. The read is over, so the transfer
        lets go here.
        """
        request = self._requests[request_id]
        if first_tokens.keys() != set(request.choices):
            raise ValueError(f"first tokens of choices {sorted(first_tokens)}, wanted {sorted(request.choices)}")
        if request.max_tokens == 1 or all(reason for _, reason in first_tokens.values()):
            raise ValueError("the first tokens leave nothing to generate")
        request.enter(RequestState.RUNNING, now_s)
        self.transfer_ended(request_id)
        for sequence in request.sequences:
            token_id, sequence.finish_reason = first_tokens[sequence.choice]
            sequence.num_planned = sequence.num_known = 1
            self.builder.init_slot(request.slot_init(sequence, token_id))
        self.builder.write_table(request.sequences[0].slot, 0, tuple(request.sequences[0].block_ids))
        self._start(request, self.builder.next_step_id)

    def beams_ready(self, request_id: str, candidates: tuple[Candidate, ...], now_s: float) -> None:
        """As `kv_ready`, for a beam search. Mutates.

        candidates: what may come first, as the source has it; raises ValueError when they leave nothing to search.
        """
        request = self._requests[request_id]
        if request.search is None or not candidates or request.search.advance([candidates]).is_over:
            raise ValueError(f"{len(candidates)} candidates leave nothing to search")
        request.enter(RequestState.RUNNING, now_s)
        self.transfer_ended(request_id)
        first = request.sequences[0]
        first.num_planned = 1
        self.builder.write_table(first.slot, 0, tuple(first.block_ids))
        self._start(request, self.builder.next_step_id)
        self.batch.beams.take(request, first, candidates)
        self.batch.beams.select()

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        self._project_from_now()
        step_id = self.builder.next_step_id
        self._bring_back(step_id, now_s)
        self._make_room(step_id, now_s)
        rows, stalled = self.batch.plan_rows(step_id, self._num_available)
        token_budget = self.limits.max_step_tokens - len(rows)
        chunks, completed = self.prompts.plan_chunks(token_budget, step_id, now_s)
        for request in completed:
            request.enter(RequestState.RUNNING, now_s)
            for sequence in request.sequences:
                sequence.num_planned = 1
            self._start(request, step_id + 1)
        plan = self.builder.build(chunks, rows)
        self.num_stalls += len(stalled)
        for request in stalled:
            self.budget.running(request, self.builder.next_step_id)
        return plan

    def commit(self, output: StepOutput, now_s: float) -> tuple[TokenEvent, ...]:
        """A step has run: the tokens that count. Requests with all choices ended are released. Mutates.

        A beam search has no tokens until it is over, and then all of them.
        """
        events: list[TokenEvent] = []
        for token in output.tokens:
            event = self.batch.commit(token)
            if event is not None:
                events.append(event)
        self._step_committed(output.step_id)
        for request in self.batch.beams.select():
            events += hypothesis_events(request)
            self._finish(request, RequestState.FINISHED, now_s)
        for event in events:
            if event.finish_reason is not None:
                self.budget.choice_ended(event.index + 1)
                self._choice_ended(event.request_id, now_s)
        self._project_from_now()
        return tuple(events)

    def counts(self, token: SampledToken) -> bool:
        return self.batch.counts(token)

    def _choice_ended(self, request_id: str, now_s: float) -> None:
        request = self.get(request_id)
        if request is None:
            return
        if all(sequence.finish_reason for sequence in request.sequences):
            self._finish(request, RequestState.FINISHED, now_s)
        elif request.state is RequestState.RUNNING:
            self.budget.running(request, self.builder.next_step_id)

    def take_evicted(self) -> tuple[Request, ...]:
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def steps_abandoned(self) -> None:
        super().steps_abandoned()
        self._project_from_now()

    def _project_from_now(self) -> None:
        """The next step is where the projection begins. Called when commits have released what they release."""
        self.budget.step = step = self.builder.next_step_id
        for request_id in self.budget.projection.overdue(step):
            request = self.get(request_id)
            if request is not None and request.state is RequestState.RUNNING:
                self.budget.running(request, step)  # it is longer than was estimated
            profile = self.budget.projection.get(request_id)
            if profile is not None and profile.until < step:
                self.budget.shrink(request_id, profile.peak(self.limits.block_size))

    def _step_committed(self, step_id: int) -> None:
        for request_id in self.preemption.step_committed(step_id):
            self.budget.end(request_id)  # nothing of it is left in the pool
        super()._step_committed(step_id)

    # -- ends --------------------------------------------------------------------------------------

    def _finish(self, request: Request, state: RequestState, now_s: float) -> None:
        self.batch.discard(request.request_id)
        self._unloaded.pop(request.request_id, None)
        super()._finish(request, state, now_s)

    def _on_ending(self, request: Request) -> None:
        if request.request_id not in self.preemption:
            self.budget.hold(request.request_id, num_distinct_blocks(request), request.last_step_id)

    def _release(self, request: Request) -> None:
        self.preemption.discard(request.request_id)
        super()._release(request)

    # -- memory that runs short --------------------------------------------------------------------

    @property
    def _num_available(self) -> int:
        """Free blocks but those that are kept for reads to come."""
        return self.allocator.num_free - sum(self._unloaded.values())

    def _bring_back(self, step_id: int, now_s: float) -> None:
        """Preempted requests run again, the most important first, if they fit as a newcomer would have to."""
        while (request := self.preemption.next_to_resume()) is not None:
            num_blocks = self.preemption.num_blocks_of(request.request_id)
            block_size, tables = self.limits.block_size, self.preemption.tables_of(request.request_id)
            num_ahead = growth_blocks(request, block_size, block_size, tables)
            room = self._num_available - self.preemption.num_protected_blocks()
            if num_blocks + num_ahead > room or not self.budget.resume(request, num_blocks):
                return
            self.preemption.swap_in(request, step_id)
            self.batch.resume(request)
            request.enter(RequestState.RUNNING, now_s)

    def _make_room(self, step_id: int, now_s: float) -> None:
        """Preempt until the rows of this step have their blocks, now or when steps in flight have let go of them."""
        requests = [request for request in self.batch.requests if not request.awaits_selection]
        if self._num_available >= sum([len(request.sequences) for request in requests]):
            return
        requests.sort(key=importance)
        needed = {request.request_id: growth_blocks(request, 1, self.limits.block_size) for request in requests}
        while sum(needed.values()) > self._num_available + self._num_coming():
            victim = self._victim()
            if victim is None:
                return
            del needed[victim.request_id]
            self._preempt(victim, step_id, now_s)

    def _num_coming(self) -> int:
        """Blocks that come free with the commits of steps in flight."""
        over = [*self._ending, *(r for r in self.batch.requests if num_planned(r) >= r.max_tokens)]
        return self.preemption.num_cooling + sum(num_distinct_blocks(request) for request in over)

    def _victim(self) -> Request | None:
        """The least important that may be preempted. Never the only one: nobody would be helped."""
        requests = self.batch.requests
        able = [r for r in requests if num_planned(r) < r.max_tokens and not self.preemption.is_protected(r)]
        able = [r for r in able if not r.awaits_selection]  # which of its blocks it keeps is not known
        return max(able, key=importance) if able and len(requests) > 1 else None

    def _preempt(self, request: Request, step_id: int, now_s: float) -> None:
        num_blocks = num_distinct_blocks(request)
        if self.preemption.swap_out(request, step_id):
            request.enter(RequestState.PREEMPTED, now_s)
            self.batch.pause(request)
            self.budget.hold(request.request_id, num_blocks, step_id)
        else:
            self.preemption.num_evicted += 1
            self._evicted.append(request)
            self._finish(request, RequestState.EVICTED, now_s)

    def _allocate_prompt(self, request: Request) -> tuple[int, ...]:
        block_ids = self.allocator.allocate(num_blocks_for(request.prompt_len, self.limits.block_size))
        request.sequences[0].block_ids = list(block_ids)
        return block_ids

    def _start(self, request: Request, first_step: int) -> None:
        """Fork the prompt's blocks to the other choices (a search forks by itself) and join the running batch."""
        first, *others = request.sequences if request.search is None else request.sequences[:1]
        for sequence in others:
            self.allocator.share(first.block_ids)
            sequence.block_ids = list(first.block_ids)
            self.builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        self.batch.add(request)
        self.budget.running(request, first_step)
