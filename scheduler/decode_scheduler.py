"""Scheduler of a decode engine: admission by memory, KV loaded or prefilled here, then the running batch."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.decode_batcher import DecodeBatcher
from scheduler.engine_scheduler import EngineScheduler, PoolLimits
from scheduler.memory_budget import blocks_for_generation, num_blocks_for
from scheduler.outcome import TokenEvent
from scheduler.plan import SlotInit, StepOutput, StepPlan
from scheduler.request import Request, RequestState


class DecodeScheduler(EngineScheduler):
    """Promises all that a request can need: prompt, and max_tokens for each choice."""

    def __init__(self, limits: PoolLimits) -> None:
        """Raises ValueError when running sequences alone could fill a step, so that prompts would starve."""
        if limits.max_step_tokens < limits.max_sequences:
            raise ValueError(f"{limits.max_step_tokens} step tokens for {limits.max_sequences} sequences")
        super().__init__(limits)
        self.batch = DecodeBatcher(self.allocator, self.builder, limits.block_size)

    def blocks_needed(self, request: Request) -> int:
        return blocks_for_generation(
            request.prompt_len, request.max_tokens, len(request.choices), self.limits.block_size
        )

    def _slots_needed(self, request: Request) -> int:
        return len(request.choices)

    def _on_admitted(self, request: Request) -> None:
        if request.local_prefill:
            self._allocate_prompt(request)
            for sequence in request.sequences:
                self.builder.init_slot(SlotInit(sequence.slot, sequence.choice, request.sampling, None))
            self.builder.write_table(request.sequences[0].slot, 0, tuple(request.sequences[0].block_ids))
            self.prompts.add(request)

    # -- KV that comes from a source ---------------------------------------------------------------

    def begin_load(self, request_id: str, now_s: float) -> tuple[int, ...]:
        """Allocate the prompt's blocks and hold them for the read; the ids, in prompt order. Mutates."""
        request = self._requests[request_id]
        request.enter(RequestState.LOADING, now_s)
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
            self.builder.init_slot(SlotInit(sequence.slot, sequence.choice, request.sampling, token_id))
        self.builder.write_table(request.sequences[0].slot, 0, tuple(request.sequences[0].block_ids))
        self._start(request)

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        step_id = self.builder.next_step_id
        rows = self.batch.plan_rows(step_id)
        token_budget = self.limits.max_step_tokens - len(rows)
        chunks, completed = self.prompts.plan_chunks(token_budget, step_id, now_s)
        for request in completed:
            request.enter(RequestState.RUNNING, now_s)
            for sequence in request.sequences:
                sequence.num_planned = 1
            self._start(request)
        return self.builder.build(chunks, rows)

    def commit(self, output: StepOutput, now_s: float) -> tuple[TokenEvent, ...]:
        """A step has run: the tokens that count. Requests with all choices ended are released. Mutates."""
        events = []
        for token in output.tokens:
            event = self.batch.commit(token)
            if event is not None:
                events.append(event)
        self._step_committed(output.step_id)
        for event in events:
            if event.finish_reason is not None:
                self._finish_if_done(event.request_id, now_s)
        return tuple(events)

    def _finish_if_done(self, request_id: str, now_s: float) -> None:
        request = self.get(request_id)
        if request is not None and all(sequence.finish_reason for sequence in request.sequences):
            self._finish(request, RequestState.FINISHED, now_s)

    def _finish(self, request: Request, state: RequestState, now_s: float) -> None:
        self.batch.discard(request.request_id)
        super()._finish(request, state, now_s)

    def _allocate_prompt(self, request: Request) -> tuple[int, ...]:
        block_ids = self.allocator.allocate(num_blocks_for(request.prompt_len, self.limits.block_size))
        request.sequences[0].block_ids = list(block_ids)
        return block_ids

    def _start(self, request: Request) -> None:
        """Fork the prompt's blocks to the other choices and join the running batch."""
        first, *others = request.sequences
        for sequence in others:
            self.allocator.share(first.block_ids)
            sequence.block_ids = list(first.block_ids)
            self.builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        self.batch.add(request)
