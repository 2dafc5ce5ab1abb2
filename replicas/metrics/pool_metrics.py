"""The metrics of one engine replica, prefill or decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from replicas.kv.handoff_actions import LossReason, SourceOutcome
from replicas.kv.pair_rate import Pace
from replicas.metrics import metric_buckets
from replicas.metrics.metric_set import MetricSet
from replicas.speculation.draft_model_counts import UNDRAFTED_CAUSES
from scheduler.draft_acceptance import DRAFT_COUNTS

BLOCK_STATES = ("free", "cached", "reserved", "active", "leased")
PREEMPTIONS = ("swap", "recompute")
PREFIX_RESULTS = ("device", "host", "miss")
LANES = ("prefill", "decode")
OPEN_TRANSFERS = ("leased", "expected", "waiting", "reading", "quarantined")
# As the transfer thread counts them: a reader's "ready" and losses, and how a source's leases ended.
TRANSFER_RESULTS = (
    "ready",
    *(f"lost: {reason}" for reason in LossReason),
    *(f"source: {outcome}" for outcome in SourceOutcome),
)
TRANSFER_ERRORS = ("malformed", "unreachable", "read", "probe", "poll", "callback", "refused", "disputed", "internal")
PACES = tuple(Pace)
DRAFT_POSITIONS = tuple(str(position) for position in range(1, DRAFT_COUNTS[-1] + 1))
STEP_DRAFTS = tuple(str(count) for count in (0, *DRAFT_COUNTS))
GRAMMAR_LOOKUPS = ("hit", "miss")
# refused: not compiled; limit: took too much work in mid-answer; strayed: the answer was none of it, a bug.
GRAMMAR_FAILURES = ("refused", "limit", "strayed")


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """dtype: of the model and its activations. quantisation: a scheme in a word (`Scheme.describe`), or none.
    kv_dtype: of the pool."""

    dtype: str = "float32"
    quantisation: str = "none"
    kv_dtype: str = "float32"


class PoolMetrics(MetricSet):
    """One per replica. Counters that another object keeps already are brought up to date before a snapshot
    (GuardedMetric.count_to); the rest is updated where it happens.
    """

    def __init__(
        self, model_name: str, pool: str, version: str, ray_version: str, engine: str, backend: str,
        numbers: ModelNumbers | None = None,
    ) -> None:  # fmt: skip
        """pool: "prefill" | "decode"; engine: what computes, "cpu" | "cuda"; backend: what moves KV, such as "ucx".
        numbers: those of a model in float32, if not said."""
        super().__init__(model_name, pool, version, ray_version, engine)
        text = "Always 1; the labels say what numbers the model, its quantised weights and its KV cache are"
        self.gauge("splitserve_model_info", text, fixed=self.of_pool | asdict(numbers or ModelNumbers())).set(1)
        self._add_blocks()
        self._add_transfers({"backend": backend})
        self._add_pairs({"backend": backend})
        self._add_times()
        self._add_tokens()
        self._add_drafts()
        self._add_lanes()
        self._add_grammars()

    def set_kv_blocks(self, num_by_state: Mapping[str, int]) -> None:
        """Blocks in each of BLOCK_STATES (missing: 0), which add up to the pool, and the usage that follows."""
        for state in BLOCK_STATES:
            self._kv_blocks.set(num_by_state.get(state, 0), state=state)
        total = sum(num_by_state.values())
        num_unused = num_by_state.get("free", 0) + num_by_state.get("cached", 0)
        self._kv_usage.set(1.0 - num_unused / total if total else 0.0)

    def _add_blocks(self) -> None:
        self._kv_blocks = self.gauge(
            "splitserve_kv_blocks",
            "KV blocks by state; cached: nobody needs them, their prefixes may be found again",
            {"state": BLOCK_STATES},
            fixed=self.of_pool,
        )
        self._kv_usage = self.gauge(
            "splitserve_kv_cache_usage_ratio",
            "Share of the KV blocks that are neither free nor cached, 0 to 1",
            fixed=self.of_pool,
        )

        self.prefix_tokens = self.counter(
            "splitserve_prefix_tokens",
            "Prompt tokens looked up in the prefix cache; device: their KV was there, host: it was in host memory",
            {"result": PREFIX_RESULTS},
            fixed=self.of_pool,
        )
        self.prefix_evictions = self.counter(
            "splitserve_prefix_evicted_blocks", "Cached KV blocks given away for other use", fixed=self.of_pool
        )
        self.prefix_saves = self.counter(
            "splitserve_prefix_saved_blocks", "Cached KV blocks copied to host memory", fixed=self.of_pool
        )
        self.host_damage = self.counter(
            "splitserve_host_damaged_blocks",
            "KV blocks that came back from host memory other than they went; nothing was generated from them",
            fixed=self.of_pool,
        )
        self.cached_host_blocks = self.gauge(
            "splitserve_host_cached_kv_blocks", "Cached KV blocks in host memory", fixed=self.of_pool
        )
        self.host_blocks = self.gauge(
            "splitserve_host_kv_blocks", "KV blocks of preempted requests in host memory", fixed=self.of_pool
        )
        self.preemptions = self.counter(
            "splitserve_preemptions",
            "Requests that gave way for want of KV memory; swap: to host memory, recompute: replayed by the router",
            {"kind": PREEMPTIONS},
            fixed=self.of_pool,
        )

    def _add_transfers(self, fixed: Mapping[str, str]) -> None:
        self.kv_transfers = self.counter(
            "splitserve_kv_transfers", "KV transfers ended, by result", {"result": TRANSFER_RESULTS}, fixed=fixed
        )
        self.kv_transfers_open = self.gauge(
            "splitserve_kv_transfers_open",
            "KV transfers under way; waiting: reads whose turn has not come; quarantined: reads whose end is not known "
            "long after their transfer ended",
            {"state": OPEN_TRANSFERS},
            fixed=self.of_pool,
        )
        self.kv_transfer_errors = self.counter(
            "splitserve_kv_transfer_errors",
            "Faults seen by the transfer thread",
            {"kind": TRANSFER_ERRORS},
            fixed=fixed,
        )
        self.kv_transfer_bytes = self.counter("splitserve_kv_transfer_bytes", "KV bytes read", fixed=fixed)
        self.kv_transfer_busy = self.counter(
            "splitserve_kv_transfer_busy_seconds", "Summed duration of the reads that succeeded", fixed=fixed
        )
        self.kv_transfer_time = self.histogram(
            "splitserve_kv_transfer_seconds",
            "From a handoff, or the last part of it, to KV confirmed",
            metric_buckets.TRANSFER_S,
            fixed=fixed,
        )

    def _add_pairs(self, fixed: Mapping[str, str]) -> None:
        self.kv_pairs = self.gauge(
            "splitserve_kv_transfer_pairs", "Replicas whose KV is read here, by how fast", {"pace": PACES}, fixed=fixed
        )
        self.kv_rate = self.peer_gauge(
            "splitserve_kv_transfer_rate_bytes_per_second",
            "How fast KV is read from a replica: measured when they met, then a moving average; the slowest",
            fixed,
        )
        self.kv_latency = self.peer_gauge(
            "splitserve_kv_transfer_latency_seconds", "How long the smallest read from it takes", fixed
        )

    def _add_times(self) -> None:
        self.queue_time = self.histogram(
            "splitserve_queue_time_seconds",
            "From arrival at the replica to admission",
            metric_buckets.FIRST_TOKEN_S,
            fixed=self.of_pool,
        )
        self.prefill_time = self.histogram(
            "splitserve_prefill_time_seconds",
            "From admission to the first token",
            metric_buckets.FIRST_TOKEN_S,
            fixed=self.of_pool,
        )
        self.decode_time = self.histogram(
            "splitserve_decode_time_seconds", "From KV in place to the last token", metric_buckets.REQUEST_S
        )
        self.step_time = self.histogram(
            "splitserve_step_seconds", "Duration of one engine step", metric_buckets.STEP_S, fixed=self.of_pool
        )

    def _add_tokens(self) -> None:
        self.forwarded_tokens = self.counter(
            "splitserve_forwarded_tokens", "Tokens computed by decode rows that counted", fixed=self.of_pool
        )
        self.surplus_tokens = self.counter(
            "splitserve_surplus_tokens",
            "Tokens sampled and dropped: past a sequence's end, or of a request ended meanwhile, its first included",
            fixed=self.of_pool,
        )
        self.prefilled_tokens = self.counter(
            "splitserve_prefilled_tokens", "Prompt tokens computed", fixed=self.of_pool
        )

    def _add_drafts(self) -> None:
        self.drafted_tokens = self.counter(
            "splitserve_speculative_drafted_tokens",
            "Tokens guessed ahead, by their place behind the last one that was known",
            {"position": DRAFT_POSITIONS},
            fixed=self.of_pool,
        )
        self.accepted_tokens = self.counter(
            "splitserve_speculative_accepted_tokens",
            "Of these, those that the model itself chose there",
            {"position": DRAFT_POSITIONS},
            fixed=self.of_pool,
        )
        self.drafted_steps = self.counter(
            "splitserve_speculative_steps",
            "Steps whose guesses were chosen, by the most for one sequence; 0: it would not have paid",
            {"drafts": STEP_DRAFTS},
            fixed=self.of_pool,
        )
        self.draft_rests = self.counter(
            "splitserve_speculative_rests",
            "Times that guessing was given up for a sequence, for some tokens, as it was wrong too often",
            fixed=self.of_pool,
        )
        self.undrafted_rows = self.counter(
            "splitserve_speculative_rows_without_drafts",
            "Rows of a step that the draft model guessed nothing for: its KV cache was full, it had not read the "
            "prompt yet, or the sequence is too long for it",
            {"cause": UNDRAFTED_CAUSES},
            fixed=self.of_pool,
        )
        self.failed_drafters = self.counter(
            "splitserve_speculative_failed_drafters",
            "1 if what guesses has failed: nothing is guessed any more, see the log",
            fixed=self.of_pool,
        )

    def _add_lanes(self) -> None:
        self.lanes = self.gauge(
            "splitserve_lanes",
            "2 where prompts are computed beside rows, 1 where in the same steps",
            fixed=self.of_pool,
        )
        self.lane_steps = self.counter(
            "splitserve_lane_steps", "Steps of each of two lanes", {"lane": LANES}, fixed=self.of_pool
        )
        self.lane_busy = self.counter(
            "splitserve_lane_busy_seconds",
            "Summed duration of the steps of each of two lanes",
            {"lane": LANES},
            fixed=self.of_pool,
        )
        self.lane_processors = self.gauge(
            "splitserve_lane_processors",
            "Multiprocessors of the prefill lane in its last step; 0: the whole card",
            fixed=self.of_pool,
        )

    def _add_grammars(self) -> None:
        self.grammar_compile_time = self.histogram(
            "splitserve_grammar_compile_seconds",
            "How long it takes to compile the grammar of a request, or to refuse it",
            metric_buckets.COMPILE_S,
            fixed=self.of_pool,
        )
        self.grammar_lookups = self.counter(
            "splitserve_grammar_lookups",
            "Grammars of requests; hit: it was compiled before",
            {"result": GRAMMAR_LOOKUPS},
            fixed=self.of_pool,
        )
        self.grammars_worn_out = self.counter(
            "splitserve_grammars_worn_out",
            "Grammars compiled anew, as their answers together had reached structured_outputs.fuel.max_lexer_states",
            fixed=self.of_pool,
        )
        self.grammar_failures = self.counter(
            "splitserve_grammar_failures",
            "Requests ended because of their grammar; limit: following it took too much work; strayed: a bug",
            {"reason": GRAMMAR_FAILURES},
            fixed=self.of_pool,
        )
        self.mask_time = self.histogram(
            "splitserve_mask_seconds",
            "How long a step's choice of tokens waited for masks, of steps that have some",
            metric_buckets.MASK_S,
            fixed=self.of_pool,
        )
        self.masks = self.counter("splitserve_masks", "Tokens chosen under a mask", fixed=self.of_pool)
