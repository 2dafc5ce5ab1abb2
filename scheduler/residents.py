"""The requests of one engine from submission until their last block is free: queue, memory, slots, ends, safe release.

All methods run on the engine thread; none blocks; `now_s` is monotonic.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from scheduler.admission import distinct_blocks, num_own_blocks
from scheduler.arrivals import Arrivals
from scheduler.lane import Lane
from scheduler.request import Request, RequestState

# Of a request whose prompt is computed here, until it is decoded or its KV handed over.
_STATES_OF_PROMPTS = (RequestState.ADMITTED, RequestState.PREFILLING, RequestState.LEASED)


class Residents(Arrivals):
    """Who waits, who was promised memory, who still holds some. The Scheduler, built on it, says what they compute."""

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
