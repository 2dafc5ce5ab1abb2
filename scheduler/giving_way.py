"""Who gives way when memory runs short, and who comes back: the least important, and the most important first."""

from __future__ import annotations

from scheduler.admission import num_own_blocks
from scheduler.draft_planner import DraftRoom
from scheduler.plan import Slice
from scheduler.preemption import growth_blocks, importance, num_planned
from scheduler.request import Request, RequestState
from scheduler.residents import Residents


class GivingWay(Residents):
    """Within the plan of a step of rows: what is swapped is part of it, and so is what of the cache is copied."""

    def take_evicted(self) -> tuple[Request, ...]:
        """Requests that the last plans ended for want of memory: state EVICTED. Mutates: each is named once."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def room_to_grow(self) -> int:
        """Free blocks for running sequences while nothing happens but that they grow.

        0 while more does: prompts are in work, somebody is over or away whose blocks a step must still let go of, or
        somebody waits who might be admitted.
        """
        is_busy = len(self.prompts) or self._handing_over or self._moving_out or self._ending
        is_short = self.preemption or self.preemption.is_cooling
        if is_busy or is_short or (self.num_queued and self._free_slots):
            return 0
        if self.host_tier is None:
            return self._num_available
        return 0 if self.host_tier.is_busy else min(self._num_available, self.host_tier.num_before_saves)

    def _fetch(self, rows: list[Slice]) -> int:
        """Behind whoever gives way in this step: what it takes is not fetched. How many blocks are."""
        if self.host_tier is None:
            return 0
        return self.host_tier.fetch(self.builder.next_step_id, has_rows=bool(rows))

    def _save(self, num_fetched: int, rows: list[Slice], chunks: list[Slice]) -> None:
        if self.host_tier is not None:
            self.host_tier.save(self.builder.next_step_id, num_fetched, is_large=bool(chunks and not rows))

    def _room_for_drafts(self, num_rows: int, num_blocks: int) -> DraftRoom:
        """Beside so many rows, in so many free blocks. Prompts of the same step get half of what rows leave of it."""
        num_tokens = max(0, self.limits.max_step_tokens - num_rows)
        if self.prompts and not self.has_two_lanes:
            num_tokens //= 2
        return DraftRoom(num_tokens, num_blocks, self.budget.num_ahead())

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
        requests = [request for request in self.batch.requests if not request.awaits_tokens]
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
        over = [*self._ending, *(r for r in self.batch.requests if num_planned(r) >= r.spec.max_tokens)]
        return self.preemption.num_cooling + sum(num_own_blocks(request) for request in over)

    def _victim(self) -> Request | None:
        """The least important that may be preempted. Never the only one: nobody would be helped."""
        requests = self.batch.requests
        able = [r for r in requests if num_planned(r) < r.spec.max_tokens and not self.preemption.is_protected(r)]
        able = [r for r in able if not r.awaits_tokens]  # which of its blocks it keeps is not known
        return max(able, key=importance) if able and len(requests) > 1 else None

    def _preempt(self, request: Request, step_id: int, now_s: float) -> None:
        num_blocks = num_own_blocks(request)
        if self.preemption.swap_out(request, step_id):
            request.enter(RequestState.PREEMPTED, now_s)
            self.batch.pause(request)
            self.budget.hold(request.request_id, num_blocks, step_id)
        else:
            self.preemption.num_evicted += 1
            self._evicted.append(request)
            self._finish(request, RequestState.EVICTED, now_s)
