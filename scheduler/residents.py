"""The requests of one engine from submission until their last block is free: queue, memory, slots, ends, safe release.

All methods run on the engine thread; none blocks; `now_s` is monotonic.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from scheduler.admission import distinct_blocks, num_own_blocks
from scheduler.holdings import Holdings
from scheduler.lane import Lane
from scheduler.memory_budget import blocks_for_generation, blocks_needed, num_blocks_for, tokens_moved_in
from scheduler.outcome import DuplicateRequest, NeverFits, NotCapable
from scheduler.request import Request, RequestState, Sequence
from scheduler.waiting_queue import WaitingQueue

# Of a request whose prompt is computed here, until it is decoded or its KV handed over.
_STATES_OF_PROMPTS = (RequestState.ADMITTED, RequestState.PREFILLING, RequestState.LEASED)


class Residents(Holdings):
    """Who waits, who was promised memory, who still holds some. The Scheduler, built on it, says what they compute."""

    def blocks_needed(self, request: Request) -> int:
        """Most blocks the request can ever need."""
        return blocks_needed(request, self.limits.block_size)

    # -- arrival and admission ---------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request. Raises NeverFits when waiting could not help, NotCapable when this engine has no such half,
        DuplicateRequest for a known id.
        """
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        if (missing := self.capabilities.missing(request)) is not None:
            raise NotCapable(request.request_id, missing)
        needed = blocks_needed(request, self.limits.block_size)
        reserved_blocks, reserved_slots = self._reserved_from(request)
        if not self.budget.fits_ever(needed, hands_over=request.hands_over):
            block_size, num_blocks = self.limits.block_size, self.budget.num_blocks - reserved_blocks
            raise NeverFits("tokens of KV memory", needed * block_size, num_blocks * block_size)
        num_slots, most_slots = len(request.slot_choices), self.limits.max_sequences - reserved_slots
        if num_slots > most_slots:
            raise NeverFits("sequence slots", num_slots, most_slots)
        if self.prefixes is not None:
            self.prefixes.submitted(request)
        request.may_draft = self.drafts is not None and not request.hands_over and self.drafts.may_draft(request)
        request.entered_s[RequestState.QUEUED] = now_s
        self._queue_of(request).add(request, self._cost(request))
        self._requests[request.request_id] = request
        self._deadlines.add(request.request_id, request.deadline_s)

    def _cost(self, request: Request) -> int:
        """What its client is charged for it, in tokens."""
        if request.hands_over:
            return request.prompt_len
        most, num_choices = request.spec.max_tokens, len(request.spec.choices)
        return request.prompt_len + num_choices * min(most, self.expected_tokens or most)

    def admit(self, now_s: float) -> tuple[Request, ...]:
        """Promise memory and slots to queued requests, in the queue's order and with its overtakers. Mutates.

        Where requests are decoded here and prompts computed for other engines, the latter go first, and have memory and
        a slot that nobody else gets: requests that are admitted here and wait for their prompts' KV may wait for an
        engine whose own requests wait for these prompts.
        """
        self._project_from_now()
        if not self._free_slots:
            return ()

        def lets_in(request: Request) -> bool:
            num_free = len(self._free_slots) - self._reserved_from(request)[1]
            if len(request.slot_choices) > num_free or (found := self._promise(request)) is None:
                return False
            self._let_in(request, found, now_s)
            return True

        def admit_from(queue: WaitingQueue) -> tuple[Request, ...]:
            return queue.admit(lets_in, self._max_overtakes, self._ends_first, self._suspects.must_wait)

        for_others = () if self._handovers is self._queue or not len(self._handovers) else admit_from(self._handovers)
        if self.preemption:
            return for_others  # who gave way comes back first
        return (*for_others, *admit_from(self._queue))

    def _ends_first(self, request: Request, waiting: Request) -> bool:
        """Whether `request`, let in now, is projected to be over before `waiting` could be let in."""
        if self.prefixes is not None:
            waiting.num_shared = self.prefixes.guess(waiting)
        found = self._starts.ends_first(request, waiting, self.builder.next_step_id)
        waiting.num_shared = 0
        return found

    def _promise(self, request: Request) -> list[int] | None:
        """Promise memory if there is any for it; mutates only then. None: there is not; else blocks that are here
        already and hold the beginning of its prompt."""
        num_prompt_blocks = self._num_first_blocks(request)
        # Prompts for others do not wait for who gave way: that may wait for an engine that waits for these.
        num_protected = 0 if request.hands_over else self.preemption.num_protected_blocks()
        room = self._num_available - num_protected
        if self.prefixes is None:
            return [] if num_prompt_blocks <= room and self.budget.promise(request) else None
        # Many ask in vain, and again in the next turn: they are answered by what is cheap to know.
        request.num_shared = self.prefixes.guess(request)
        if num_prompt_blocks - request.num_shared <= room and self.budget.fits(request):
            found = self.prefixes.find(request)
            held = self.prefixes.held(found)
            request.num_shared = len(held)
            joined = self.prefixes.shared.would_join(held)
            if num_prompt_blocks - len(held) <= room and self.budget.promise(request, joined):
                return found
        request.num_shared = 0
        return None

    def _let_in(self, request: Request, found: list[int], now_s: float) -> None:
        request.enter(RequestState.ADMITTED, now_s)
        request.admission_number, request.admission_step = self._num_admitted, self.builder.next_step_id
        self._num_admitted += 1
        self._suspects.let_in(request)
        request.sequences = [Sequence(choice, heapq.heappop(self._free_slots)) for choice in request.slot_choices]
        if self.prefixes is not None:
            self.prefixes.take(request, found)
            request.sequences[0].block_ids = found
        if not request.local_prefill:
            self._unloaded[request.request_id] = self._num_first_blocks(request) - len(found)
            return
        request.num_prefilled = request.num_cached
        self._allocate_prompt(request)
        if self.host_tier is None or not self.host_tier.take(request):
            self.prompts.add(request)

    def _num_first_blocks(self, request: Request) -> int:
        """Blocks of what is there before its first row here: its prompt, and what it has generated elsewhere."""
        block_size = self.limits.block_size
        if not request.num_generated:
            return num_blocks_for(request.prompt_len, block_size)
        num_tokens = tokens_moved_in(request, block_size)
        return blocks_for_generation(request.prompt_len, num_tokens, len(request.spec.choices), block_size)

    def _take_slots(self, request: Request) -> None:
        """The step being planned begins its prompt, so what is noted of its slots is over when the step is. Mutates."""
        builder = self.prefill_lane.builder
        for sequence in request.sequences:
            builder.init_slot(request.slot_init(sequence))
        first = request.sequences[0]
        builder.write_table(first.slot, 0, tuple(first.block_ids))

    def _allocate_prompt(self, request: Request) -> tuple[int, ...]:
        """Blocks for what was not found of its prompt; these. Mutates."""
        table = request.sequences[0].block_ids
        num_missing = num_blocks_for(request.prompt_len, self.limits.block_size) - len(table)
        block_ids = self.allocator.allocate(num_missing, after=table[-1] if table else None)
        table += block_ids
        return block_ids

    def get(self, request_id: str) -> Request | None:
        """The request, while it holds anything and is not over."""
        request = self._requests.get(request_id)
        return None if request is None or request.is_over else request

    def _project_from_now(self) -> None:
        """The next step is where the projection begins. Called when commits have released what they release."""
        for request in self.batch.take_moved():
            if request.state is RequestState.RUNNING:
                self.budget.running(request, self.builder.next_step_id)
        self.budget.move_to(self.builder.next_step_id, self.get)

    # -- ends --------------------------------------------------------------------------------------

    def end(self, request_id: str, state: RequestState, now_s: float) -> bool:
        """Cancel or fail a request in any state; False when it is already over. Mutates.

        Blocks go back as soon as no step in flight computes on them and no transfer holds them.
        """
        request = self.get(request_id)
        if request is None:
            return False
        self._finish(request, state, now_s)
        return True

    def expired(self, now_s: float) -> tuple[str, ...]:
        """Requests whose deadline has passed, each named once. The caller ends them."""
        return self._deadlines.pop_due(now_s)

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline that `expired` has not named yet, or None."""
        return self._deadlines.next_s

    def _finish(self, request: Request, state: RequestState, now_s: float) -> None:
        lane = self._lane_of(request)
        self.batch.discard(request.request_id)
        self._unloaded.pop(request.request_id, None)
        request.enter(state, now_s)
        self._deadlines.discard(request.request_id)
        self._queue_of(request).discard(request.request_id)
        self.prompts.discard(request)
        if self.host_tier is not None:
            self.host_tier.discard(request)
        if lane.is_done_with(request):
            self._release(request)
            return
        lane.ending.append(request)
        if request.request_id in self.preemption:
            return
        if lane is self.decode_lane:
            self.budget.hold(request.request_id, num_own_blocks(request), request.last_step_id)
        else:  # after which of the rows' steps that will be is not known
            self.budget.shrink(request.request_id, num_own_blocks(request))

    def _lane_of(self, request: Request) -> Lane:
        """The only one that can have steps in flight which compute on its blocks, or copy into them."""
        if self.host_tier is not None and request.request_id in self.host_tier:
            return self.decode_lane
        return self.prefill_lane if request.state in _STATES_OF_PROMPTS else self.decode_lane

    def _step_committed(self, lane: Lane, step_id: int) -> None:
        """Everything up to `step_id` of this lane has run: blocks that waited for it go back."""
        if lane is self.decode_lane:
            for request_id, block_ids in self.preemption.step_committed(step_id):
                self._let_go(self._requests[request_id], block_ids)
                self.budget.end(request_id)  # nothing of it is left in the pool
            if self.host_tier is not None:
                self.host_tier.saved(step_id)
        for request in lane.committed(step_id):
            self._release(request)

    @property
    def _ending(self) -> list[Request]:
        """Over, but a step in flight still computes on their blocks."""
        if not self.has_two_lanes:
            return self.decode_lane.ending
        return self.prefill_lane.ending + self.decode_lane.ending

    def steps_abandoned(self) -> None:
        """No step launched or being planned will be committed (the engine failed): nothing waits for one. Mutates.

        Their tokens are lost, so the caller ends every request that is prefilling or running.
        """
        if self.prefixes is not None:
            self.prefixes.forget()  # whatever went wrong, no later request is to see it
        for lane in (self.prefill_lane, self.decode_lane) if self.has_two_lanes else (self.decode_lane,):
            lane.builder.abandon()
            lane.chunks.clear()
            self._step_committed(lane, lane.builder.next_step_id - 1)
        if self.host_tier is not None:
            self.host_tier.abandoned()
        self._project_from_now()

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Something is wrong with the KV in these blocks: nobody finds it any more. Mutates."""
        if self.prefixes is not None:
            self.prefixes.forget(block_ids)

    def distrust_request(self, request_id: str) -> None:
        """Likewise, of one whose output shows it. Mutates."""
        request = self.get(request_id)
        if request is not None:
            self.distrust(distinct_blocks(sequence.block_ids for sequence in request.sequences))

    def _release(self, request: Request) -> None:
        """The request lets go of its blocks and slots. If over, its promise ends, but for what a transfer holds."""
        self.preemption.discard(request.request_id)
        self._handing_over.pop(request.request_id, None)
        if self.has_two_lanes:
            self.builder.forget(frozenset([sequence.slot for sequence in request.sequences]))
        if request.num_shared:
            in_transfer = set(self._transfers.get(request.request_id, ()))
            blocks = distinct_blocks(sequence.block_ids for sequence in request.sequences)
            self._let_go(request, [block_id for block_id in blocks if block_id not in in_transfer])
        for sequence in request.sequences:
            self.allocator.release(sequence.block_ids)
            sequence.block_ids = []
            heapq.heappush(self._free_slots, sequence.slot)
        request.sequences = []
        if not request.is_over:
            return
        if request.request_id in self._transfers:
            num_held = len(self._transfers[request.request_id]) - request.num_shared
            self.budget.shrink(request.request_id, num_held)
        else:
            self._forget(request.request_id)

    def _let_go(self, request: Request, block_ids: list[int]) -> None:
        """It holds these no more, each named once: what it shares of them is for the others. Mutates."""
        if request.num_shared and self.prefixes is not None:
            self.prefixes.let_go(request, block_ids)

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        if RequestState.ADMITTED in request.entered_s:
            self.budget.end(request_id)

    # -- transfers: the second owner ---------------------------------------------------------------

    def _hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """The transfer holds these, too. Mutates."""
        self.allocator.hold(block_ids)
        self._transfers[request_id] = self._transfers.get(request_id, ()) + block_ids

    def _hold_up_to(self, request: Request, num_blocks: int) -> tuple[int, ...]:
        """The transfer holds the first num_blocks of its prompt, too; those of them that it did not before. Mutates."""
        num_held = len(self._transfers.get(request.request_id, ()))
        if block_ids := tuple(request.sequences[0].block_ids[num_held:num_blocks]):
            self._hold(request.request_id, block_ids)
        return block_ids

    def transfer_ended(self, request_id: str) -> None:
        """The transfer lets go of its blocks (read finished or failed, lease over). Idempotent.

        For a read whose end is never known this is never called: its blocks stay held, and promised, until
        the engine restarts.
        """
        block_ids = self._transfers.pop(request_id, None)
        if block_ids is None:
            return
        self.allocator.unhold(block_ids)
        request = self._requests[request_id]
        if request.num_shared:
            kept = {block_id for sequence in request.sequences for block_id in sequence.block_ids}
            self._let_go(request, [block_id for block_id in block_ids if block_id not in kept])
        if request.is_over and not request.sequences:
            self._forget(request_id)
