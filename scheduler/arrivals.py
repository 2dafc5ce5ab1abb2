"""How requests come to hold something in one engine: queued, then admitted with memory and slots.

All methods run on the engine thread; none blocks; `now_s` is monotonic.
"""

from __future__ import annotations

import heapq

from scheduler.holdings import Holdings
from scheduler.memory_budget import blocks_for_generation, blocks_needed, num_blocks_for, tokens_moved_in
from scheduler.outcome import DuplicateRequest, NeverFits, NotCapable
from scheduler.request import Request, RequestState, Sequence
from scheduler.waiting_queue import WaitingQueue


class Arrivals(Holdings):
    """Who waits, and who was promised memory. Residents, built on it, say how requests end."""

    def blocks_needed(self, request: Request) -> int:
        """Most blocks the request can ever need."""
        return blocks_needed(request, self.limits.block_size)

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
