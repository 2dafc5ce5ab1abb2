"""Every metric of SplitServe: its type, labels and buckets, and which processes have it. Dashboards, alerts and tests
go by this table; tests/cluster/test_metric_table.py holds it against what the processes say.

All series have `model_name`, and `replica`, which the merge adds; those with `pool` say whose they are. In the
exposition counters end in _total. Seconds, bytes and ratios (0 to 1) are in the names, all else is counted. Serve's
proxy has none of these; one metric there is Ray's: proxy_slow_readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cluster.monitoring.ingress_metrics import (
    CALL_PARSERS,
    CALL_RESULTS,
    DECISIONS,
    ENDPOINTS,
    ENGINE_POOLS,
    FINISH_REASONS,
    GRAMMAR_CHECKS,
    GRAMMAR_REFUSALS,
    LOSSES,
    MOVE_CAUSES,
    MOVE_OUTCOMES,
    OBJECTIVES,
    OUTCOMES,
    POOLS,
    PREFIX_TOKENS,
    PROMPT_ROUTES,
    REJECTIONS,
    RETRY_STAGES,
    ROLES,
    SPAN_ENDS,
    UNLIKENESS,
)
from replicas.metrics import metric_buckets as buckets
from replicas.metrics.pool_metrics import (
    BLOCK_STATES,
    DRAFT_POSITIONS,
    GRAMMAR_FAILURES,
    GRAMMAR_LOOKUPS,
    LANES,
    OPEN_TRANSFERS,
    PACES,
    PREEMPTIONS,
    PREFIX_RESULTS,
    STEP_DRAFTS,
    TRANSFER_ERRORS,
    TRANSFER_RESULTS,
)
from replicas.speculation.draft_model_counts import UNDRAFTED_CAUSES

Labels = dict[str, tuple[str, ...] | None]

INGRESS = ("ingress",)
ENGINES = ("prefill", "decode")
ALL = (*INGRESS, *ENGINES)
PREFIX = "splitserve_"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """labels: beside model_name and replica: the values each may take, None where one value holds for the process (its
    pool, version, backend), or for a peer: some that come and go. Values that are in no list are reported as
    "other". of: the kinds of processes."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    of: tuple[str, ...]
    labels: Labels
    buckets: tuple[float, ...] = ()


def metric_table() -> Iterator[MetricRow]:
    """All rows, in the order of a request's way."""
    yield from _request_rows()
    yield from _engine_rows()
    yield from _process_rows()


def _request_rows() -> Iterator[MetricRow]:
    """What clients see, and what the router decides."""
    for name, labels in _REQUEST_COUNTERS.items():
        yield MetricRow(PREFIX + name, "counter", INGRESS, labels)
    for name, bounds in _REQUEST_HISTOGRAMS.items():
        yield MetricRow(PREFIX + name, "histogram", INGRESS, {}, bounds)


def _engine_rows() -> Iterator[MetricRow]:
    """What the pools do."""
    for name, labels in _ENGINE_COUNTERS.items():
        yield MetricRow(PREFIX + name, "counter", ENGINES, labels)
    for name, labels in _ENGINE_GAUGES.items():
        yield MetricRow(PREFIX + name, "gauge", ENGINES, labels)
    for name, (bounds, labels) in _ENGINE_HISTOGRAMS.items():
        yield MetricRow(PREFIX + name, "histogram", ENGINES, labels, bounds)


def _process_rows() -> Iterator[MetricRow]:
    pool: Labels = {"pool": None}
    yield MetricRow(PREFIX + "requests_in_flight", "gauge", ALL, pool)
    yield MetricRow(PREFIX + "requests_queued", "gauge", ALL, pool)
    yield MetricRow(PREFIX + "metric_errors", "counter", ALL, pool)
    yield MetricRow(PREFIX + "build_info", "gauge", ALL, {**pool, "version": None, "ray_version": None, "engine": None})
    yield MetricRow(PREFIX + "metrics_scrape_failures", "counter", INGRESS, {"of_pool": POOLS})
    yield MetricRow(PREFIX + "trace_spans", "counter", INGRESS, {"result": SPAN_ENDS})
    yield MetricRow(PREFIX + "unlike_replicas", "gauge", INGRESS, {"of_pool": ENGINES, "reason": UNLIKENESS})
    yield MetricRow(PREFIX + "slow_transfers", "gauge", INGRESS, {})
    yield MetricRow(PREFIX + "migrations", "counter", INGRESS, {"cause": MOVE_CAUSES, "outcome": MOVE_OUTCOMES})
    yield MetricRow(PREFIX + "migration_seconds", "histogram", INGRESS, {}, buckets.FIRST_TOKEN_S)
    yield MetricRow(PREFIX + "migrated_tokens", "counter", INGRESS, {})
    yield MetricRow(PREFIX + "replica_losses", "counter", INGRESS, {"of_pool": POOLS, "reason": LOSSES})
    prefix_labels: Labels = {"of_pool": ENGINES, "what": PREFIX_TOKENS}
    yield MetricRow(PREFIX + "router_prefix_tokens", "counter", INGRESS, prefix_labels)
    yield MetricRow(PREFIX + "autoscaler_desired_replicas", "gauge", INGRESS, {"pool": ENGINES})
    yield MetricRow(PREFIX + "autoscaler_prefill_decode_ratio", "gauge", INGRESS, {})
    yield MetricRow(PREFIX + "replicas_ordered", "gauge", INGRESS, {"pool": ENGINES})
    yield MetricRow(PREFIX + "replica_start_seconds", "gauge", INGRESS, {"pool": ENGINES})
    yield MetricRow(PREFIX + "queue_moves", "counter", INGRESS, {})


_REQUEST_COUNTERS: dict[str, Labels] = {
    "requests": {"endpoint": ENDPOINTS, "outcome": OUTCOMES},
    "request_success": {"finish_reason": FINISH_REASONS},
    "request_rejections": {"pool": None, "reason": REJECTIONS},
    "slow_readers": {},
    "tool_calls": {"parser": CALL_PARSERS, "result": CALL_RESULTS},
    "unseen_tools": {},
    "unenforced_tools": {},
    "slo_requests": {"slo": OBJECTIVES},
    "slo_violations": {"slo": OBJECTIVES},
    "router_decisions": {"policy": None, "result": DECISIONS},
    "router_roles": {"of_pool": ENGINE_POOLS, "role": ROLES},
    "retries": {"stage": RETRY_STAGES},
    "prompt_tokens": {},
    "routed_prompt_tokens": {"route": PROMPT_ROUTES},
    "cached_prompt_tokens": {"route": PROMPT_ROUTES},
    "generation_tokens": {},
    "grammar_checks": {"result": GRAMMAR_CHECKS},
    "grammar_refusals": {"reason": GRAMMAR_REFUSALS},
}
_REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": buckets.FIRST_TOKEN_S,
    "inter_token_latency_seconds": buckets.PER_TOKEN_S,
    "request_time_per_output_token_seconds": buckets.PER_TOKEN_S,
    "e2e_request_latency_seconds": buckets.REQUEST_S,
    "request_prompt_tokens": buckets.TOKENS,
    "request_generation_tokens": buckets.TOKENS,
    "cold_start_wait_seconds": buckets.REQUEST_S,
    "grammar_check_seconds": buckets.FIRST_TOKEN_S,
}
_ENGINE_COUNTERS: dict[str, Labels] = {
    "prefilled_tokens": {"pool": None},
    "forwarded_tokens": {"pool": None},
    "surplus_tokens": {"pool": None},
    "speculative_drafted_tokens": {"pool": None, "position": DRAFT_POSITIONS},
    "speculative_accepted_tokens": {"pool": None, "position": DRAFT_POSITIONS},
    "speculative_steps": {"pool": None, "drafts": STEP_DRAFTS},
    "speculative_rests": {"pool": None},
    "speculative_rows_without_drafts": {"pool": None, "cause": UNDRAFTED_CAUSES},
    "speculative_failed_drafters": {"pool": None},
    "preemptions": {"pool": None, "kind": PREEMPTIONS},
    "prefix_tokens": {"pool": None, "result": PREFIX_RESULTS},
    "prefix_evicted_blocks": {"pool": None},
    "prefix_saved_blocks": {"pool": None},
    "host_damaged_blocks": {"pool": None},
    "kv_transfers": {"backend": None, "result": TRANSFER_RESULTS},
    "kv_transfer_errors": {"backend": None, "kind": TRANSFER_ERRORS},
    "kv_transfer_bytes": {"backend": None},
    "kv_transfer_busy_seconds": {"backend": None},
    "lane_steps": {"pool": None, "lane": LANES},
    "lane_busy_seconds": {"pool": None, "lane": LANES},
    "grammar_lookups": {"pool": None, "result": GRAMMAR_LOOKUPS},
    "grammars_worn_out": {"pool": None},
    "grammar_failures": {"pool": None, "reason": GRAMMAR_FAILURES},
    "masks": {"pool": None},
}
_ENGINE_GAUGES: dict[str, Labels] = {
    "kv_blocks": {"pool": None, "state": BLOCK_STATES},
    "kv_cache_usage_ratio": {"pool": None},
    "host_kv_blocks": {"pool": None},
    "host_cached_kv_blocks": {"pool": None},
    "model_info": {"pool": None, "dtype": None, "quantisation": None, "kv_dtype": None},
    "lanes": {"pool": None},
    "lane_processors": {"pool": None},
    "kv_transfers_open": {"pool": None, "state": OPEN_TRANSFERS},
    "kv_transfer_pairs": {"backend": None, "pace": PACES},
    "kv_transfer_rate_bytes_per_second": {"backend": None, "peer": None},
    "kv_transfer_latency_seconds": {"backend": None, "peer": None},
}
_ENGINE_HISTOGRAMS: dict[str, tuple[tuple[float, ...], Labels]] = {
    "queue_time_seconds": (buckets.FIRST_TOKEN_S, {"pool": None}),
    "prefill_time_seconds": (buckets.FIRST_TOKEN_S, {"pool": None}),
    "kv_transfer_seconds": (buckets.TRANSFER_S, {"backend": None}),
    "decode_time_seconds": (buckets.REQUEST_S, {}),
    "step_seconds": (buckets.STEP_S, {"pool": None}),
    "grammar_compile_seconds": (buckets.COMPILE_S, {"pool": None}),
    "mask_seconds": (buckets.MASK_S, {"pool": None}),
}
