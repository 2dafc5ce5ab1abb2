"""What the schedulers of both pools share: queue, admission by memory, ends, and safe release.

Subclasses say how much a request needs and what running it means. All methods run on the engine thread;
none blocks; `now_s` is monotonic.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass

from scheduler.block_allocator import BlockAllocator
from scheduler.deadlines import Deadlines
from scheduler.memory_budget import Budget
from scheduler.outcome import DuplicateRequest, Ledger, NeverFits
from scheduler.plan import SampledToken, StepPlan
from scheduler.plan_builder import PlanBuilder
from scheduler.prefill_batcher import PrefillBatcher
from scheduler.request import TERMINAL_STATES, Request, RequestState, Sequence
from scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Size of one engine. max_step_tokens bounds prompt tokens plus rows of one step."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_step_tokens: int


class EngineScheduler(ABC):
    """Requests of one engine from submission until their last block is free."""

    budget: Budget

    def __init__(self, limits: PoolLimits, budget: Budget, max_overtakes: int = 0) -> None:
        """max_overtakes: requests behind one that does not fit yet that may be admitted before it."""
        self.limits = limits
        self.budget = budget
        self._max_overtakes = max_overtakes
        self._num_admitted = 0
        self.allocator = BlockAllocator(limits.num_blocks)
        self.builder = PlanBuilder()
        self.prompts = PrefillBatcher()
        self._queue = WaitingQueue()
        self._num_queued_tokens = 0
        self._requests: dict[str, Request] = {}  # everything that holds anything
        self._free_slots = list(range(limits.max_sequences))
        self._ending: list[Request] = []  # over, but a step in flight still computes on their blocks
        self._transfers: dict[str, tuple[int, ...]] = {}  # blocks that a transfer holds, by request
        self._deadlines = Deadlines()
        self._committed_step_id = -1

    # -- what differs between the pools ------------------------------------------------------------

    @abstractmethod
    def blocks_needed(self, request: Request) -> int:
        """Most blocks the request can ever need."""

    @abstractmethod
    def _promise(self, request: Request) -> bool:
        """Promise memory if there is any for it; mutates only then."""

    @abstractmethod
    def _slots_needed(self, request: Request) -> int:
        """Runner slots taken at admission."""

    @abstractmethod
    def _cost(self, request: Request) -> int:
        """What its client is charged for it, in tokens."""

    @abstractmethod
    def _on_admitted(self, request: Request) -> None:
        """Memory is promised; start what can start."""

    @abstractmethod
    def _on_ending(self, request: Request) -> None:
        """The request is over, but keeps its blocks until a step in flight has run."""

    @abstractmethod
    def plan(self, now_s: float) -> StepPlan | None:
        """What the next step does, or None when there is nothing to compute. Mutates."""

    # -- arrival and admission ---------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request. Raises NeverFits when waiting could not help, DuplicateRequest for a known id."""
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        needed = self.blocks_needed(request)
        if not self.budget.fits_ever(needed):
            block_size = self.limits.block_size
            raise NeverFits("tokens of KV memory", needed * block_size, self.budget.num_blocks * block_size)
        if self._slots_needed(request) > self.limits.max_sequences:
            raise NeverFits("sequence slots", self._slots_needed(request), self.limits.max_sequences)
        request.entered_s[RequestState.QUEUED] = now_s
        self._queue.add(request, self._cost(request))
        self._num_queued_tokens += _tokens_to_prefill(request)
        self._requests[request.request_id] = request
        self._deadlines.add(request.request_id, request.deadline_s)

    def admit(self, now_s: float) -> tuple[Request, ...]:
        """Promise memory and slots to queued requests, in the order of the queue. Mutates.

        One that does not fit yet may be passed by at most max_overtakes requests behind it, ever: then nobody behind
        it is admitted before it. So what it waits for is those before it (waiting_queue has the bound), these few,
        and memory and slots, which come as running requests end. Looks at no more than max_overtakes + 1 that do not
        fit, however many wait.
        """
        admitted: list[Request] = []
        passed: list[Request] = []
        with closing(self._queue.in_order()) as waiting_in_order:
            for request in waiting_in_order:
                if any(waiting.num_overtaken >= self._max_overtakes for waiting in passed):
                    break
                if self._slots_needed(request) <= len(self._free_slots) and self._promise(request):
                    for waiting in passed:
                        waiting.num_overtaken += 1
                    self._let_in(request, now_s)
                    admitted.append(request)
                    continue
                passed.append(request)
                if len(passed) > self._max_overtakes:
                    break
        for request in admitted:
            self._queue.take(request.request_id)
            self._num_queued_tokens -= _tokens_to_prefill(request)
        return tuple(admitted)

    def _let_in(self, request: Request, now_s: float) -> None:
        request.enter(RequestState.ADMITTED, now_s)
        request.admission_number = self._num_admitted
        self._num_admitted += 1
        choices = request.choices[: self._slots_needed(request)]
        request.sequences = [Sequence(choice, heapq.heappop(self._free_slots)) for choice in choices]
        self._on_admitted(request)

    def counts(self, token: SampledToken) -> bool:
        """Whether a sampled token is one of its request's, and not surplus."""
        return self.get(token.request_id) is not None

    def get(self, request_id: str) -> Request | None:
        """The request, while it holds anything and is not over."""
        request = self._requests.get(request_id)
        return None if request is None or request.is_over else request

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
        request.enter(state, now_s)
        self._deadlines.discard(request.request_id)
        if self._queue.discard(request.request_id):
            self._num_queued_tokens -= _tokens_to_prefill(request)
        self.prompts.discard(request)
        if request.last_step_id <= self._committed_step_id:
            self._release(request)
        else:
            self._ending.append(request)
            self._on_ending(request)

    def _step_committed(self, step_id: int) -> None:
        """Everything up to `step_id` has run: blocks of ended requests that waited for it go back."""
        self._committed_step_id = step_id
        due = [request for request in self._ending if request.last_step_id <= step_id]
        if due:
            self._ending = [request for request in self._ending if request.last_step_id > step_id]
        for request in due:
            self._release(request)

    def steps_abandoned(self) -> None:
        """No step launched or being planned will be committed (the engine failed): nothing waits for one. Mutates.

        Their tokens are lost, so the caller ends every request that is prefilling or running.
        """
        self.builder.abandon()
        self._step_committed(self.builder.next_step_id - 1)

    def _release(self, request: Request) -> None:
        """The request lets go of its blocks and slots. If over, its promise ends, but for what a transfer holds."""
        for sequence in request.sequences:
            self.allocator.release(sequence.block_ids)
            sequence.block_ids = []
            heapq.heappush(self._free_slots, sequence.slot)
        request.sequences = []
        if not request.is_over:
            return
        if request.request_id in self._transfers:
            self.budget.shrink(request.request_id, len(self._transfers[request.request_id]))
        else:
            self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        if RequestState.ADMITTED in request.entered_s:
            self.budget.end(request_id)

    # -- transfers: the second owner ---------------------------------------------------------------

    def _hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        self.allocator.hold(block_ids)
        self._transfers[request_id] = block_ids

    def transfer_ended(self, request_id: str) -> None:
        """The transfer lets go of its blocks (read finished or failed, lease over). Idempotent.

        For a read whose end is never known this is never called: its blocks stay held, and promised, until
        the engine restarts (design law 2).
        """
        block_ids = self._transfers.pop(request_id, None)
        if block_ids is None:
            return
        self.allocator.unhold(block_ids)
        request = self._requests[request_id]
        if request.is_over and not request.sequences:
            self._forget(request_id)

    def take_evicted(self) -> tuple[Request, ...]:
        """Requests that the last plans ended for want of memory: state EVICTED. Mutates: each is named once."""
        return ()

    # -- load, as policies see it ------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Slots in use, one per choice: also those of ended requests that a step in flight computes on."""
        return self.limits.max_sequences - len(self._free_slots)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens yet to be computed here, queued ones included."""
        return self._num_queued_tokens + self.prompts.num_pending_tokens

    def free_blocks(self) -> int:
        """Blocks that a newcomer may use at every step to come."""
        return self.budget.available

    def later_free_blocks(self) -> tuple[int, ...]:
        """As free_blocks, from later steps on (admission.LATER_STEPS); empty where nothing is projected."""
        return ()

    @property
    def expected_tokens(self) -> int | None:
        """What a choice that starts now is taken to generate, or None: as many as its max_tokens."""
        return None

    # -- what is held ------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """Everything held. O(requests): for now and then, not for every step."""
        states = [request.state for request in self._requests.values()]
        num_leased = states.count(RequestState.LEASED)
        num_over = sum(states.count(state) for state in TERMINAL_STATES)
        return Ledger(
            blocks=self.allocator.counts(),
            promised_blocks=self.budget.promised,
            budget_blocks=self.budget.num_blocks,
            num_queued=len(self._queue),
            queued_prompt_tokens=self.queued_prompt_tokens,
            num_active=len(states) - len(self._queue) - num_leased - num_over,
            num_leased=num_leased,
            num_ending=num_over,
            used_slots=self.limits.max_sequences - len(self._free_slots),
        )


def _tokens_to_prefill(request: Request) -> int:
    """Prompt tokens that will be computed here rather than loaded."""
    return request.prompt_len if request.local_prefill else 0
