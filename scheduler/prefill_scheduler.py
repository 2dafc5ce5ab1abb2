"""Scheduler of a prefill engine: prompts in, first tokens out, blocks leased until their reader is done."""

from __future__ import annotations

from scheduler.beam_batcher import hypothesis_events
from scheduler.engine_scheduler import EngineScheduler, PoolLimits
from scheduler.memory_budget import MemoryBudget, num_blocks_for
from scheduler.outcome import PromptDone, TokenEvent
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.request import Request, RequestState


class PrefillScheduler(EngineScheduler):
    """Promises a prompt's blocks only; the promise ends with the lease."""

    budget: MemoryBudget

    def __init__(self, limits: PoolLimits) -> None:
        super().__init__(limits, MemoryBudget(limits.num_blocks))

    def blocks_needed(self, request: Request) -> int:
        return num_blocks_for(request.prompt_len, self.limits.block_size)

    def _promise(self, request: Request) -> bool:
        return self.budget.promise(request.request_id, self.blocks_needed(request))

    def _slots_needed(self, request: Request) -> int:
        return 1

    def _cost(self, request: Request) -> int:
        return request.prompt_len

    def _on_admitted(self, request: Request) -> None:
        (sequence,) = request.sequences
        sequence.block_ids = list(self.allocator.allocate(self.blocks_needed(request)))
        self.builder.init_slot(request.slot_init(sequence))
        self.builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        self.prompts.add(request)

    def _on_ending(self, request: Request) -> None:
        """Its promise ends with its release."""

    def plan(self, now_s: float) -> StepPlan | None:
        chunks, _ = self.prompts.plan_chunks(self.limits.max_step_tokens, self.builder.next_step_id, now_s)
        return self.builder.build(chunks, [])

    def commit(self, output: StepOutput, now_s: float) -> tuple[PromptDone, ...]:
        """A step has run: prompts it completed, each with its blocks held for the transfer to come. Mutates."""
        self._step_committed(output.step_id)
        firsts: dict[str, list[TokenEvent]] = {}
        searches: list[PromptDone] = []
        for token in output.tokens:
            request = self.get(token.request_id)
            if request is not None and request.search is not None:
                searches.append(self._search_begun(request, token, now_s))
            elif request is not None:
                reason = request.finish_reason_of(token.token_id, num_known=1)
                event = TokenEvent(token.request_id, token.choice, 0, token.token_id, reason, token.logprobs)
                firsts.setdefault(token.request_id, []).append(event)
        done = [self._prompt_done(self._requests[rid], tuple(events), now_s) for rid, events in firsts.items()]
        return (*done, *searches)

    def lease_ended(self, request_id: str, now_s: float) -> None:
        """The reader confirmed, dropped or died, or the lease expired: the blocks are free. Idempotent."""
        request = self.get(request_id)
        if request is not None and request.state is RequestState.LEASED:
            self._finish(request, RequestState.FINISHED, now_s)
        self.transfer_ended(request_id)

    def _prompt_done(self, request: Request, first_tokens: tuple[TokenEvent, ...], now_s: float) -> PromptDone:
        if all(event.finish_reason for event in first_tokens):
            self._finish(request, RequestState.FINISHED, now_s)
            return PromptDone(request.request_id, first_tokens, ())
        return PromptDone(request.request_id, first_tokens, self._lease(request, now_s))

    def _search_begun(self, request: Request, token: SampledToken, now_s: float) -> PromptDone:
        """A beam search ends here only if its first tokens end it; else the reader chooses among the candidates."""
        assert request.search is not None
        assert token.logprobs is not None, "a search begins with its tokens' log-probabilities"
        candidates = token.logprobs.top
        request.search = request.search.advance([candidates])
        if request.search.is_over:
            self._finish(request, RequestState.FINISHED, now_s)
            return PromptDone(request.request_id, tuple(hypothesis_events(request)), ())
        return PromptDone(request.request_id, (), self._lease(request, now_s), candidates)

    def _lease(self, request: Request, now_s: float) -> tuple[int, ...]:
        """Its blocks, in prompt order: from now on the transfer holds them. Mutates."""
        block_ids = tuple(request.sequences[0].block_ids)
        self._hold(request.request_id, block_ids)
        request.enter(RequestState.LEASED, now_s)
        self._release(request)
        return block_ids
