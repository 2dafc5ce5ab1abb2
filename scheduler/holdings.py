"""What an engine holds, and what others are told of it: its lanes, queue, memory, slots and requests.

All methods run on the engine thread; none blocks; `now_s` is monotonic.
"""

from __future__ import annotations

from scheduler.admission import AdmissionPolicy, ProjectedBudget
from scheduler.block_allocator import BlockAllocator
from scheduler.capabilities import Capabilities
from scheduler.deadlines import Deadlines
from scheduler.decode_batcher import DecodeBatcher
from scheduler.draft_planner import DraftPlanner, Speculation
from scheduler.host_cache import HostCache
from scheduler.host_tier import HostTier
from scheduler.lane import Lane
from scheduler.memory_budget import Budget, MemoryBudget
from scheduler.outcome import Ledger
from scheduler.pool_limits import PoolLimits
from scheduler.preemption import Preemption
from scheduler.prefill_batcher import PrefillBatcher
from scheduler.prefix_book import PrefixBook, PrefixOptions
from scheduler.prefix_cache import PrefixCache
from scheduler.request import TERMINAL_STATES, Request, RequestState
from scheduler.start_forecast import StartForecast
from scheduler.suspects import Suspects
from scheduler.waiting_queue import WaitingQueue

# Of two lanes' prompts in one step: some 2,048 tokens keep a large card busy, and a short prompt more costs little.
_MOST_SHARED_TOKENS = 2304
_STATES_WITHOUT_TOKENS = (RequestState.QUEUED, RequestState.ADMITTED, RequestState.PREFILLING)


class Holdings:
    """Arrivals, built on it, say who comes, and Residents who goes."""

    budget: Budget

    def __init__(
        self,
        limits: PoolLimits,
        capabilities: Capabilities,
        admission: AdmissionPolicy | None = None,
        lag: int = 0,
        num_host_blocks: int = 0,
        has_two_lanes: bool = False,
        prefixes: PrefixOptions | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """lag: steps that may be in flight when one is planned, in each lane. num_host_blocks: room for those that give
        way, and for what prefixes keep there. has_two_lanes: prompts are computed in steps of their own, beside those
        of rows. prefixes: None: what was computed once is not found again. speculation: None: no row has drafts.

        Where nothing is decoded, prompts are all that takes memory: admission then does not matter. Raises ValueError
        when running sequences alone could fill a step, so that prompts would starve.
        """
        if capabilities.decodes and not has_two_lanes and limits.max_step_tokens < limits.max_sequences:
            raise ValueError(f"{limits.max_step_tokens} step tokens for {limits.max_sequences} sequences")
        self.limits, self.capabilities, self.lag = limits, capabilities, lag
        num_blocks, block_size = limits.num_blocks, limits.block_size
        self.drafts = None if speculation is None else DraftPlanner(speculation, block_size, lag)
        admission = admission or AdmissionPolicy()
        # Of two lanes one may be full while the other is looked at: as if a step more were in flight.
        most_in_flight = lag + has_two_lanes
        if capabilities.decodes:
            max_drafts = 0 if self.drafts is None else self.drafts.max_drafts
            num_reserved = limits.num_reserved_blocks if capabilities.offers else 0
            facts = num_blocks, block_size, admission, most_in_flight, max_drafts, num_reserved
            self.budget = ProjectedBudget(*facts)
            self._max_overtakes = admission.max_overtakes
        else:
            self.budget = MemoryBudget(num_blocks, block_size)
            self._max_overtakes = 0
        self._starts = StartForecast(self.budget, most_in_flight)
        self.host = HostCache(num_host_blocks)
        uses_host = prefixes is not None and prefixes.uses_host and num_host_blocks > 0 and capabilities.computes
        cache = None if prefixes is None else PrefixCache(prefixes.on_piece, has_host=uses_host)
        self.allocator = BlockAllocator(num_blocks, cache)
        self._requests: dict[str, Request] = {}  # everything that holds anything
        self.prefixes: PrefixBook | None = None
        if prefixes is not None and cache is not None:
            by_id = self._requests.__getitem__
            self.prefixes = PrefixBook(prefixes, cache, self.allocator, self.budget, block_size, by_id, self.host)
        self.has_two_lanes = has_two_lanes
        self.decode_lane = Lane()
        self.prefill_lane = Lane() if has_two_lanes else self.decode_lane
        self.builder = self.decode_lane.builder
        self.prompts = PrefillBatcher(_MOST_SHARED_TOKENS if has_two_lanes else None, limits.chunk_multiple)
        filled = None if self.prefixes is None else self.prefixes.filled
        self.batch = DecodeBatcher(self.allocator, self.builder, block_size, filled, self.drafts)
        self.preemption = Preemption(self.allocator, self.builder, block_size, self.host)
        self.host_tier: HostTier | None = None
        if self.prefixes is not None and uses_host:
            ready = self._prompt_ready
            self.host_tier = HostTier(self.host, self.prefixes, self.allocator, self.builder, block_size, ready)
        self._num_admitted = 0
        self._queue = WaitingQueue()
        self._suspects = Suspects()
        # Prompts for other engines, where requests are decoded too: these may wait for those, but never the other way.
        self._handovers = WaitingQueue() if capabilities.does_both else self._queue
        self._free_slots = list(range(limits.max_sequences))
        self._transfers: dict[str, tuple[int, ...]] = {}  # blocks that a transfer holds, by request
        self._unloaded: dict[str, int] = {}  # prompt blocks of admitted requests that are kept free for their read
        # The step that completes their prompts is in flight, and before its end nothing can follow: they hand over, to
        # another engine or to the other lane.
        self._handing_over: dict[str, Request] = {}
        self._evicted: list[Request] = []  # not named yet
        self._moving_out: dict[str, Request] = {}  # without rows, until what is in flight of them is known
        self._deadlines = Deadlines()

    def _prompt_ready(self, request: Request) -> None:
        """What host memory had of its prompt is here. Mutates."""
        if self.has_two_lanes:
            request.last_step_id = -1  # of the other lane none yet
        self.prompts.add(request)

    @property
    def _num_available(self) -> int:
        """Free and cached blocks but those that are kept for reads to come."""
        num_free = self.allocator.num_free
        return num_free - sum(self._unloaded.values()) if self._unloaded else num_free

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self._handovers if request.hands_over else self._queue

    def _reserved_from(self, request: Request) -> tuple[int, int]:
        """Blocks and slots that it may not have."""
        if request.hands_over or not self.capabilities.does_both:
            return 0, 0
        return self.limits.num_reserved_blocks, self.capabilities.num_reserved_slots

    # -- load, as policies see it ------------------------------------------------------------------

    @property
    def num_prefix_blocks(self) -> int:
        """Blocks in which what it has computed or read can be found again, the host's included. Never changes."""
        return self.limits.num_blocks + (self.host.num_blocks if self.host_tier is not None else 0)

    @property
    def num_queued(self) -> int:
        return sum([len(queue) for queue in self._queues])

    @property
    def _queues(self) -> tuple[WaitingQueue, ...]:
        return (self._queue,) if self._handovers is self._queue else (self._queue, self._handovers)

    @property
    def num_running(self) -> int:
        """Slots in use, one per choice: also those of ended requests that a step in flight computes on."""
        return self.limits.max_sequences - len(self._free_slots)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens yet to be computed here, queued ones included."""
        num_waiting = self.prompts.num_pending_tokens + sum([queue.num_prompt_tokens for queue in self._queues])
        return num_waiting if self.host_tier is None else num_waiting + self.host_tier.num_pending_tokens

    @property
    def num_changing_lanes(self) -> int:
        """Requests that the step which ends their prompt, in flight now, makes rows."""
        return sum([not request.hands_over for request in self._handing_over.values()])

    def oldest_prompt_s(self, now_s: float) -> float:
        """How long the prompt has waited that waits longest for its first token; 0.0: there is none. O(requests)."""
        waiting = [request for request in self._requests.values() if request.state in _STATES_WITHOUT_TOKENS]
        return max((now_s - request.entered_s[RequestState.QUEUED] for request in waiting), default=0.0)

    def free_blocks(self) -> int:
        """Blocks that a newcomer may use at every step to come."""
        return 0 if self.preemption else self.budget.free_from(0)

    def missing_blocks(self) -> int:
        """Blocks by which the highest use to come is more than there are, and those of who has given way."""
        return max(0, self.budget.promised - self.budget.num_blocks) + self.preemption.num_blocks_away

    def later_free_blocks(self) -> tuple[int, ...]:
        """As free_blocks, from later steps on (admission.LATER_STEPS); empty where nothing is projected."""
        later = self.budget.later_free()
        return (0,) * len(later) if self.preemption else later

    @property
    def expected_tokens(self) -> int | None:
        """What a choice that starts now is taken to generate, or None: as many as its max_tokens."""
        return self.budget.expected_tokens

    def ledger(self) -> Ledger:
        """Everything held. O(requests): for now and then, not for every step."""
        states = [request.state for request in self._requests.values()]
        num_leased = states.count(RequestState.LEASED)
        num_over = sum([states.count(state) for state in TERMINAL_STATES]) if states else 0
        return Ledger(
            blocks=self.allocator.counts(),
            promised_blocks=self.budget.promised,
            budget_blocks=self.budget.num_blocks,
            num_queued=self.num_queued,
            queued_prompt_tokens=self.queued_prompt_tokens,
            num_active=len(states) - self.num_queued - num_leased - num_over,
            num_leased=num_leased,
            num_ending=num_over,
            used_slots=self.limits.max_sequences - len(self._free_slots),
        )
