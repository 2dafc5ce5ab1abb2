"""Fills an engine's metrics: from its replies as they go out, from its counters and its ledger when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from replicas.kv.pair_rate import PairRate
from replicas.kv.transfer_thread import TransferSnapshot
from replicas.messages import CallStatus, GenerateReply
from replicas.metrics.engine_status import EngineStatus, StepClock
from replicas.metrics.lane_clock import LaneClock
from replicas.metrics.metric_set import FamilySnapshot
from replicas.metrics.pool_metrics import LANES, PACES, PoolMetrics
from scheduler.draft_counts import DraftCounts
from scheduler.prefix_book import PrefixStats


class EngineMetrics:
    """`snapshot` runs on the replica's event loop, the rest on the engine thread. Nothing here raises."""

    def __init__(self, pool: PoolMetrics) -> None:
        self._pool = pool

    def prompt_done(self, status: CallStatus, queue_s: float, prefill_s: float) -> None:
        """A prefill call was answered."""
        if status is CallStatus.OK:
            self._pool.queue_time.observe(queue_s)
            self._pool.prefill_time.observe(prefill_s)

    def generation_done(self, reply: GenerateReply) -> None:
        """A generate call was answered."""
        if reply.status is CallStatus.OK:
            self._pool.queue_time.observe(reply.queue_s)
            self._pool.decode_time.observe(reply.decode_s)
            if reply.prefill_s:
                self._pool.prefill_time.observe(reply.prefill_s)

    def kv_loaded(self, transfer_s: float) -> None:
        """A prompt's KV was read, confirmed and verified, so long after its handoff, or its last part, had come."""
        self._pool.kv_transfer_time.observe(transfer_s)

    def step_done(self, duration_s: float) -> None:
        self._pool.step_time.observe(duration_s)

    def grammar_compiled(self, duration_s: float) -> None:
        """A grammar was compiled or refused. On a thread of the cache."""
        self._pool.grammar_compile_time.observe(duration_s)

    def masks_made(self, num_masks: int, duration_s: float) -> None:
        """A step's choice waited so long for masks. num_masks: how many of its rows have one."""
        self._pool.mask_time.observe(duration_s)
        self._pool.masks.add(num_masks)

    def grammar_failed(self, reason: str) -> None:
        """A request ended because of its grammar. reason: one of GRAMMAR_FAILURES."""
        self._pool.grammar_failures.add(1, reason=reason)

    def preempted(self, num_swapped: int, num_evicted: int, num_host_blocks: int) -> None:
        """Preemptions so far, by what became of them, and host blocks in use. Like `snapshot`, on the event loop."""
        self._pool.preemptions.count_to(num_swapped, kind="swap")
        self._pool.preemptions.count_to(num_evicted, kind="recompute")
        self._pool.host_blocks.set(num_host_blocks)

    def drafted(self, counts: DraftCounts) -> None:
        """Drafts so far. On the event loop."""
        for place, (drafted, accepted) in enumerate(zip(counts.drafted, counts.accepted, strict=True), 1):
            self._pool.drafted_tokens.count_to(drafted, position=str(place))
            self._pool.accepted_tokens.count_to(accepted, position=str(place))
        for count, num_steps in counts.steps.items():
            self._pool.drafted_steps.count_to(num_steps, drafts=str(count))
        self._pool.draft_rests.count_to(counts.num_rests)

    def drafters_failed(self, num_failed: int) -> None:
        """Drafters that are asked no more, so far. On the event loop."""
        self._pool.failed_drafters.count_to(num_failed)

    def undrafted(self, rows: Mapping[str, int]) -> None:
        """Rows so far that the draft model made no drafts for, by cause. On the event loop."""
        for cause, num_rows in rows.items():
            self._pool.undrafted_rows.count_to(num_rows, cause=cause)

    def prefixes_looked_up(self, stats: PrefixStats) -> None:
        """In the prefix cache. On the event loop."""
        num_missed = stats.num_looked_up_tokens - stats.num_found_tokens - stats.num_host_tokens
        self._pool.prefix_tokens.count_to(stats.num_found_tokens, result="device")
        self._pool.prefix_tokens.count_to(stats.num_host_tokens, result="host")
        self._pool.prefix_tokens.count_to(num_missed, result="miss")
        self._pool.prefix_evictions.count_to(stats.num_evicted_blocks)

    def prefixes_on_host(self, num_saved: int, num_cached: int) -> None:
        """Blocks copied to host memory so far, and those that are there. On the event loop."""
        self._pool.prefix_saves.count_to(num_saved)
        self._pool.cached_host_blocks.set(num_cached)

    def host_blocks_damaged(self, num_blocks: int) -> None:
        """So many came back otherwise."""
        self._pool.host_damage.add(num_blocks)

    def grammars_looked_up(self, num_hits: int, num_misses: int, num_worn_out: int) -> None:
        """Of the cache, so far. On the event loop."""
        self._pool.grammar_lookups.count_to(num_hits, result="hit")
        self._pool.grammar_lookups.count_to(num_misses, result="miss")
        self._pool.grammars_worn_out.count_to(num_worn_out)

    def snapshot(
        self, status: EngineStatus, steps: StepClock, transfers: TransferSnapshot, forwarded: int, surplus: int
    ) -> list[FamilySnapshot]:
        """All families as they are now. forwarded: decode rows' tokens that counted; surplus: tokens that did not."""
        pool, ledger = self._pool, status.ledger
        blocks = ledger.blocks
        # Promised and not yet allocated: free or cached in the allocator, but not for a newcomer.
        reserved = max(0, ledger.promised_blocks - blocks.request - blocks.transfer_only)
        from_free = min(reserved, blocks.free)
        pool.set_kv_blocks(
            {
                "free": blocks.free - from_free,
                "cached": blocks.cached - (reserved - from_free),
                "reserved": reserved,
                "active": blocks.request,
                "leased": blocks.transfer_only,
            }
        )
        pool.requests_in_flight.set(ledger.num_active + ledger.num_leased + ledger.num_ending)
        pool.requests_queued.set(ledger.num_queued)
        pool.prefilled_tokens.count_to(steps.num_prefilled_tokens)
        pool.forwarded_tokens.count_to(forwarded)
        pool.surplus_tokens.count_to(surplus)
        self._count_lanes(steps)
        for result, count in transfers.results.items():
            pool.kv_transfers.count_to(count, result=result)
        for kind, count in transfers.errors.items():
            pool.kv_transfer_errors.count_to(count, kind=kind)
        pool.kv_transfer_bytes.count_to(transfers.bytes_read)
        pool.kv_transfer_busy.count_to(transfers.read_s)
        for state, count in (
            ("leased", transfers.leases_open),
            ("expected", transfers.reads_expected),
            ("waiting", transfers.reads_waiting),
            ("reading", transfers.reads_in_flight),
            ("quarantined", transfers.reads_quarantined),
        ):
            pool.kv_transfers_open.set(count, state=state)
        self._set_pairs(transfers.rates.values())
        return pool.snapshot()

    def _count_lanes(self, steps: StepClock) -> None:
        pool = self._pool
        pool.lanes.set(2 if isinstance(steps, LaneClock) else 1)
        if not isinstance(steps, LaneClock):
            return
        for lane in LANES:
            pool.lane_steps.count_to(steps.num_lane_steps[lane], lane=lane)
            pool.lane_busy.count_to(steps.lane_busy_s[lane], lane=lane)
        pool.lane_processors.set(steps.num_processors)

    def _set_pairs(self, rates: Iterable[PairRate]) -> None:
        slowest_first = sorted(rates, key=lambda rate: rate.bytes_per_s)
        num_by_pace = Counter(rate.pace for rate in slowest_first)
        for pace in PACES:
            self._pool.kv_pairs.set(num_by_pace[pace], pace=pace)
        self._pool.kv_rate.replace({rate.replica_id: rate.bytes_per_s for rate in slowest_first})
        self._pool.kv_latency.replace({rate.replica_id: rate.latency_s for rate in slowest_first})
