"""Scheduler of an engine: prompts computed here or KV read, then tokens decoded here or KV offered; any mix of them.

When memory runs short all the same (outputs are longer than estimated), the least important request gives way: to
host memory, or, when that is full, by an early end after which its router replays it.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.beam_batcher import hypothesis_tokens
from scheduler.beam_search import Candidate
from scheduler.generated_token import Token
from scheduler.lane import Lane
from scheduler.moving import Moving
from scheduler.outcome import Load, PromptDone, PromptPart, StepEvents
from scheduler.plan import SampledToken, Slice, StepOutput, StepPlan
from scheduler.request import Request, RequestState


class Scheduler(Moving):
    """What the requests of one engine compute, step by step, and what passes between it and other engines."""

    num_stalls = 0  # times that a request had to wait a step for a free block

    # -- the handoff: these tokens, and these blocks ---------------------------------------------------------------

    def begin_load(self, request_id: str, now_s: float) -> Load:
        """Allocate the prompt's blocks, but for those that were found at its admission, and hold the new ones for the
        read. Mutates."""
        request = self._requests[request_id]
        request.enter(RequestState.LOADING, now_s)
        del self._unloaded[request_id]
        num_kept = len(request.sequences[0].block_ids)
        self._hold(request_id, self._allocate_prompt(request))
        return Load(tuple(request.sequences[0].block_ids), num_kept)

    def kv_ready(self, request_id: str, first_tokens: Iterable[Token], now_s: float) -> None:
        """The KV is here and confirmed: join the running batch. Mutates.

        first_tokens: as the source sampled them; raises ValueError unless they are one for each choice with something
        left to generate. The read is over, so the transfer lets go here.
        """
        request = self._requests[request_id]
        first_of = {token.choice: token for token in first_tokens}
        if first_of.keys() != set(request.spec.choices):
            raise ValueError(f"first tokens of choices {sorted(first_of)}, wanted {sorted(request.spec.choices)}")
        if request.spec.max_tokens == 1 or all(token.finish_reason for token in first_of.values()):
            raise ValueError("the first tokens leave nothing to generate")
        request.enter(RequestState.RUNNING, now_s)
        self.transfer_ended(request_id)
        for sequence in request.sequences:
            token = first_of[sequence.choice]
            sequence.finish_reason = token.finish_reason
            sequence.num_planned = sequence.num_known = 1
            self.builder.init_slot(request.slot_init(sequence, token.token_id))
        self.builder.write_table(request.sequences[0].slot, 0, tuple(request.sequences[0].block_ids))
        self._loaded(request)
        self._start(request, self.builder.next_step_id)
        for sequence in request.sequences:
            if sequence.chain is not None:
                sequence.chain.ids.append(first_of[sequence.choice].token_id)

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
        self._loaded(request)
        self._start(request, self.builder.next_step_id)
        self.batch.beams.take(request, first, candidates)
        self.batch.beams.select()

    def _loaded(self, request: Request) -> None:
        if self.prefixes is not None:
            self.prefixes.loaded(request)

    def lease_ended(self, request_id: str, now_s: float) -> None:
        """The reader confirmed, dropped or died, or the lease expired: the blocks are free, those of parts included.
        Idempotent. A prompt that is not computed yet goes on, unless it is ended before."""
        request = self.get(request_id)
        if request is not None and request.state is RequestState.LEASED:
            self._finish(request, RequestState.FINISHED, now_s)
        self.transfer_ended(request_id)

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """What the next step does, or None when there is nothing to compute. Mutates. Where there is one lane."""
        self._project_from_now()
        rows, stalled = self._plan_rows(now_s)
        num_fetched = self._fetch(rows)
        chunks: list[Slice] = []
        if self.prompts:
            chunks = self._plan_chunks(self.limits.max_step_tokens - sum([row.num_tokens for row in rows]), now_s)
        self._save(num_fetched, rows, chunks)
        plan = self.builder.build(rows, chunks, self.batch.has_drafts)
        self._stalled(stalled)
        return plan

    def plan_decode(self, now_s: float) -> StepPlan | None:
        """What the next step of the decode lane does: rows only. As `plan`."""
        self._project_from_now()
        rows, stalled = self._plan_rows(now_s)
        self._save(self._fetch(rows), rows, [])
        plan = self.builder.build(rows, [], self.batch.has_drafts)
        if plan is not None:
            for request in stalled:  # what was noted of their slots is in this step, too
                request.last_step_id = plan.step_id
        self._stalled(stalled)
        return plan

    def plan_prefill(self, now_s: float) -> StepPlan | None:
        """What the next step of the prefill lane does: parts of prompts only. As `plan`."""
        if not self.prompts:
            return None
        return self.prefill_lane.builder.build([], self._plan_chunks(self.limits.max_step_tokens, now_s))

    def _plan_rows(self, now_s: float) -> tuple[list[Slice], list[Request]]:
        """Rows, and who must wait a step for a block."""
        if not len(self.batch) and not self.preemption:
            return [], []
        step_id = self.builder.next_step_id
        self._bring_back(step_id, now_s)
        self._make_room(step_id, now_s)
        room = None if self.drafts is None or self.preemption else self._room_for_drafts
        return self.batch.plan_rows(step_id, self._num_available, room)

    def _stalled(self, requests: list[Request]) -> None:
        self.num_stalls += len(requests)
        for request in requests:
            self.budget.running(request, self.builder.next_step_id)

    def _plan_chunks(self, token_budget: int, now_s: float) -> list[Slice]:
        step_id = self.prefill_lane.builder.next_step_id
        chunks, completed = self.prompts.plan_chunks(token_budget, step_id, now_s)
        for chunk in chunks:
            request = self._requests[chunk.request_id]
            if chunk.start == request.num_cached:
                self._take_slots(request)
            if self.prefixes is not None or request.hands_over:
                self.prefill_lane.chunks.append((step_id, request, chunk.end))
        for request in completed:
            if request.hands_over or self.has_two_lanes:
                self._handing_over[request.request_id] = request
            else:
                self._run(request, step_id + 1, now_s)
        return chunks

    def _run(self, request: Request, first_step: int, now_s: float) -> None:
        """Its prompt is computed, or will be when it has its first row. Mutates."""
        request.enter(RequestState.RUNNING, now_s)
        for sequence in request.sequences:
            sequence.num_planned = 1
        self._start(request, first_step)

    def commit(self, output: StepOutput, now_s: float, lane: Lane | None = None) -> StepEvents:
        """A step has run: the tokens that count, the prompts that it completed and parts of others, their blocks held
        for the transfer. Requests with all choices ended are released. Mutates. lane: whose step; None: there is one.

        A beam search has no tokens until it is over, and then all of them.
        """
        parts = self._chunks_computed(lane or self.decode_lane, output.step_id)
        tokens, firsts, theirs = output.tokens, [], self._handing_over
        if theirs:
            self._change_lanes(tokens, now_s)
            firsts = [token for token in tokens if token.request_id in theirs]
            tokens = tuple([token for token in tokens if token.request_id not in theirs])
        events: list[Token] = []
        for token in tokens:
            event = self.batch.commit(token)
            if event is not None:
                events.append(event)
        for accepted in output.accepted:
            self.batch.settle(accepted)
        if self.host_tier is not None and (lane is None or lane is self.decode_lane):
            self.host_tier.fetched(output.step_id, output.damaged)
        self._step_committed(lane or self.decode_lane, output.step_id)
        for request in self.batch.beams.select():
            events += hypothesis_tokens(request)
            self._finish(request, RequestState.FINISHED, now_s)
        for event in events:
            if event.finish_reason is not None:
                self.budget.choice_ended(event.index + 1)
                self._choice_ended(event.request_id, now_s)
        prompts = self._prompts_done(firsts, now_s) if firsts else ()
        self._project_from_now()
        return StepEvents(tuple(events), prompts, parts)

    def _chunks_computed(self, lane: Lane, step_id: int) -> tuple[PromptPart, ...]:
        """By the steps up to this one: what can be found now, and what can be handed over. Mutates."""
        if not lane.chunks:
            return ()
        parts: list[PromptPart] = []
        for request, end in lane.computed(step_id):
            if self.prefixes is not None:
                self.prefixes.computed(request, end)
            may_go_on = request.hands_over and end < request.prompt_len and request.spec.max_tokens > 1
            if may_go_on and (block_ids := self._hold_up_to(request, end // self.limits.block_size)):
                parts.append(PromptPart(request.request_id, block_ids))
        return tuple(parts)

    def _change_lanes(self, tokens: Iterable[SampledToken], now_s: float) -> None:
        """Requests that have their first tokens by a step of the prefill lane are decoded from now on. Mutates."""
        for request_id in dict.fromkeys([token.request_id for token in tokens]):
            request = self._handing_over.get(request_id)
            if request is None or request.hands_over:
                continue
            del self._handing_over[request_id]
            if not request.is_over:
                request.last_step_id = -1  # of the other lane none yet
                self._run(request, self.builder.next_step_id, now_s)

    def counts(self, token: SampledToken) -> bool:
        """Whether a sampled token is one of its request's, and not surplus."""
        request = self._handing_over.get(token.request_id)
        return self.batch.counts(token) if request is None else not request.is_over

    def steps_passed(self, count: int) -> None:
        """As many steps as have been planned have been committed, and the running batch is as they left it. Mutates."""
        self.builder.next_step_id += count
        self.decode_lane.committed_step_id += count
        self._project_from_now()

    def _choice_ended(self, request_id: str, now_s: float) -> None:
        request = self.get(request_id)
        if request is None:
            return
        if all(sequence.finish_reason for sequence in request.sequences):
            self._finish(request, RequestState.FINISHED, now_s)
        elif request.state is RequestState.RUNNING:
            self.budget.running(request, self.builder.next_step_id)

    # -- prompts that are handed over --------------------------------------------------------------

    def _prompts_done(self, tokens: Iterable[SampledToken], now_s: float) -> tuple[PromptDone, ...]:
        """tokens: the first ones of prompts that the committed step completed. Mutates."""
        firsts: dict[str, list[Token]] = {}
        searches: list[PromptDone] = []
        for token in tokens:
            request = self.get(token.request_id)
            if request is not None and request.search is not None:
                searches.append(self._search_begun(request, token, now_s))
            elif request is not None:
                reason = request.finish_reason_of(token.token_id, num_known=1)
                event = Token(token.request_id, token.choice, 0, token.token_id, reason, token.logprobs)
                firsts.setdefault(token.request_id, []).append(event)
        done = [self._prompt_done(self._requests[rid], tuple(events), now_s) for rid, events in firsts.items()]
        return (*done, *searches)

    def _prompt_done(self, request: Request, first_tokens: tuple[Token, ...], now_s: float) -> PromptDone:
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
            return PromptDone(request.request_id, tuple(hypothesis_tokens(request)), ())
        return PromptDone(request.request_id, (), self._lease(request, now_s), candidates)

    def _lease(self, request: Request, now_s: float) -> tuple[int, ...]:
        """Its blocks, in prompt order: from now on the transfer holds them, and nobody else. Mutates."""
        block_ids = tuple(request.sequences[0].block_ids)
        self._hold_up_to(request, len(block_ids))
        request.enter(RequestState.LEASED, now_s)
        self._release(request)
        return block_ids

    def _start(self, request: Request, first_step: int) -> None:
        """Fork the prompt's blocks to the other choices (a search forks by itself) and join the running batch."""
        first, *others = request.sequences if request.search is None else request.sequences[:1]
        for sequence in others:
            self.allocator.share(first.block_ids)
            sequence.block_ids = list(first.block_ids)
            self.builder.write_table(sequence.slot, 0, tuple(sequence.block_ids))
        self._join(request, first_step)
        self._starts.started(first_step - request.admission_step)
