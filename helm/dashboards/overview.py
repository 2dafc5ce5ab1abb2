"""The overview: are users served well, and which pool is short."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders import dashboard
from panels import Panel, Source, heat, lines, new_dashboard, number, percentiles

ALL = Source('namespace=~"$namespace", model_name=~"$model_name"')
PREFILL, DECODE = 'pool="prefill"', 'pool="decode"'
_ENGINES = 'pool=~"prefill|decode"'


def overview() -> dashboard.Dashboard:
    board = new_dashboard(
        "splitserve-overview", "SplitServe / Overview", "Objectives, traffic, prefill beside decode, the handoff.", []
    )
    for title, panels in _rows():
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board


def _rows() -> Iterator[tuple[str, list[Panel]]]:
    yield "Service level objectives", _objectives()
    yield "Traffic", _traffic()
    yield "Prefill beside decode", _pools()
    yield "KV handoff", _handoff()
    yield "Where the time goes", _breakdown()
    yield "KV memory", _memory()
    yield "Scaling", _scaling()
    yield "Lengths", _lengths()
    yield "Monitoring itself", _monitoring()


def _objectives() -> list[Panel]:
    judged, missed = "slo_requests_total", "slo_violations_total"
    any_ = 'slo="any"'
    ratio = f"1 - {ALL.rate(missed, '', any_)} / ({ALL.rate(judged, '', any_)} > 0)"
    by_objective = f"{ALL.rate(missed, 'slo')} / ({ALL.rate(judged, 'slo')} > 0)"
    good = f"{ALL.rate(judged, '', any_)} - {ALL.rate(missed, '', any_)}"
    return [
        number("Attainment", "percentunit", ratio, "Share of requests that met every objective of the config's slo."),
        lines("Misses by objective", "percentunit", {"{{slo}}": by_objective}, "any: missed one, or failed.", width=10),
        lines("Goodput", "reqps", {"within objectives": good, "judged": ALL.rate(judged, "", any_)}, width=10),
        lines("Time to first token", "s", percentiles(ALL, "time_to_first_token_seconds")),
        lines(
            "Between tokens", "s", percentiles(ALL, "inter_token_latency_seconds"), "As clients see them, per choice."
        ),
        lines("Whole request", "s", percentiles(ALL, "e2e_request_latency_seconds"), "Of those answered in full."),
    ]


def _traffic() -> list[Panel]:
    return [
        lines("Requests by outcome", "reqps", {"{{outcome}}": ALL.rate("requests_total", "outcome")}, width=6),
        lines("Ends", "ops", {"{{finish_reason}}": ALL.rate("request_success_total", "finish_reason")}, width=6),
        lines(
            "Turned away",
            "reqps",
            {"{{reason}}": ALL.rate("request_rejections_total", "reason")},
            "queue_full, queue_timeout and no_capacity are the server's; too_long and auth the client's.",
            width=6,
        ),
        lines(
            "Tokens",
            "ops",
            {"prompt": ALL.rate("prompt_tokens_total"), "generated": ALL.rate("generation_tokens_total")},
            width=6,
        ),
    ]


def _pools() -> list[Panel]:
    desired = f"max by (pool) ({ALL.of('autoscaler_desired_replicas')})"
    replicas = f"count by (pool) ({ALL.of('build_info')})"
    return [
        lines("Replicas", "short", {"{{pool}}": replicas, "{{pool}} desired": desired}, width=6),
        lines("Requests in flight", "short", {"{{pool}}": ALL.sum("requests_in_flight", "pool")}, width=6),
        lines("Requests waiting", "short", {"{{pool}}": ALL.sum("requests_queued", "pool")}, width=6),
        lines("Wait for admission, p95", "s", {"{{pool}}": ALL.quantile(0.95, "queue_time_seconds", "pool")}, width=6),
        lines(
            "KV cache in use", "percentunit", {"{{pool}}": f"avg by (pool) ({ALL.of('kv_cache_usage_ratio')})"}, width=6
        ),
        lines(
            "Tokens computed",
            "ops",
            {
                "prompt, {{pool}}": ALL.rate("prefilled_tokens_total", "pool"),
                "output, {{pool}}": ALL.rate("forwarded_tokens_total", "pool"),
            },
            width=6,
        ),
        lines("Step time, mean", "s", {"{{pool}}": ALL.mean("step_seconds", "pool")}, width=6),
        lines("Steps", "ops", {"{{pool}}": ALL.rate("step_seconds_count", "pool")}, width=6),
    ]


def _handoff() -> list[Panel]:
    speed = f"{ALL.rate('kv_transfer_bytes_total')} / ({ALL.rate('kv_transfer_busy_seconds_total')} > 0)"
    return [
        lines("Transfer time", "s", percentiles(ALL, "kv_transfer_seconds"), "From memory allocated to KV confirmed."),
        lines("Bytes moved", "Bps", {"moved": ALL.rate("kv_transfer_bytes_total")}),
        lines(
            "Speed of a read",
            "Bps",
            {
                "bytes over busy time": speed,
                "slowest pair": f"min({ALL.of('kv_transfer_rate_bytes_per_second')})",
            },
            "NVLink and RDMA: tens of GB/s. TCP: below 1. Pairs are measured when they meet.",
        ),
        lines("Transfers by result", "ops", {"{{result}}": ALL.rate("kv_transfers_total", "result")}),
        lines("Transfers open", "short", {"{{pool}}: {{state}}": ALL.sum("kv_transfers_open", "pool, state")}),
        lines(
            "Route and retries",
            "ops",
            {
                "{{result}}": ALL.rate("router_decisions_total", "result"),
                "retry: {{stage}}": ALL.rate("retries_total", "stage"),
            },
            "local: short prompts that decode computes; local_...: for the cost; fallback_aggregated: no prefill "
            "replica lived.",
        ),
    ]


def _breakdown() -> list[Panel]:
    phases = {
        "queue (decode)": ALL.mean("queue_time_seconds", "", DECODE),
        "queue (prefill)": ALL.mean("queue_time_seconds", "", PREFILL),
        "prefill": ALL.mean("prefill_time_seconds"),
        "transfer": ALL.mean("kv_transfer_seconds"),
        "decode": ALL.mean("decode_time_seconds"),
    }
    time = {"per output token": ALL.mean("request_time_per_output_token_seconds")}
    return [
        lines("Mean time of a request, by phase", "s", phases, width=16, stacked=True),
        lines("Time per output token, mean", "s", time, "Of whole requests, after their first token."),
    ]


def _memory() -> list[Panel]:
    cached, routed = "cached_prompt_tokens_total", "routed_prompt_tokens_total"
    found = {
        "all": f"{ALL.rate(cached)} / ({ALL.rate(routed)} > 0)",
        "{{route}}": f"{ALL.rate(cached, 'route')} / ({ALL.rate(routed, 'route')} > 0)",
    }
    return [
        lines("Blocks of prefill", "short", {"{{state}}": ALL.sum("kv_blocks", "state", PREFILL)}, stacked=True),
        lines("Blocks of decode", "short", {"{{state}}": ALL.sum("kv_blocks", "state", DECODE)}, stacked=True),
        lines(
            "Preemptions",
            "ops",
            {"{{kind}}": ALL.rate("preemptions_total", "kind")},
            "swap: to host memory and back; recompute: replayed.",
            width=4,
        ),
        lines(
            "Host blocks in use",
            "short",
            {
                "{{pool}}": ALL.sum("host_kv_blocks", "pool"),
                "{{pool}} cached": ALL.sum("host_cached_kv_blocks", "pool"),
            },
            "Of requests that gave way, and of the prefix cache, which has what they leave.",
            width=4,
        ),
        lines(
            "Prompt tokens found in prefix caches",
            "percentunit",
            found,
            "Share of prompt tokens. remote: prefill computes the rest; local: decode does.",
        ),
    ]


def _scaling() -> list[Panel]:
    desired = f"max by (pool) ({ALL.of('autoscaler_desired_replicas')})"
    replicas = f"count by (pool) ({ALL.of('build_info', _ENGINES)})"
    ordered = f"max by (pool) ({ALL.of('replicas_ordered')})"
    ratio = f"max ({ALL.of('autoscaler_prefill_decode_ratio')})"
    start = f"max by (pool) ({ALL.of('replica_start_seconds')})"
    return [
        lines(
            "Desired and actual replicas",
            "short",
            {"{{pool}} desired": desired, "{{pool}} actual": replicas, "{{pool}} on their way": ordered},
            width=12,
        ),
        lines("How long a start takes", "s", {"{{pool}}": start}, "The longest of the last ones, or a guess.", width=4),
        lines("Waiting requests moved to room", "ops", {"requests": ALL.rate("queue_moves_total")}, width=4),
        lines("Prefill replicas for each decode replica", "short", {"desired": ratio}, width=4),
        lines("Cold starts waited for", "ops", {"requests": ALL.rate("cold_start_wait_seconds_count")}, width=4),
        lines(
            "Replicas lost",
            "ops",
            {"{{of_pool}}: {{reason}}": ALL.rate("replica_losses_total", "of_pool, reason")},
            "As ingresses found them before Serve did.",
            width=4,
        ),
        lines(
            "Replicas of another model",
            "short",
            {"{{of_pool}}: {{reason}}": f"max by (of_pool, reason) ({ALL.of('unlike_replicas')})"},
            "They exchange no KV with the rest. Some while an update goes on.",
            width=4,
        ),
    ]


def _lengths() -> list[Panel]:
    return [
        heat("Prompt length", "short", ALL, "request_prompt_tokens", "Tokens."),
        heat("Output length", "short", ALL, "request_generation_tokens", "Tokens, of all choices of a request."),
    ]


def _monitoring() -> list[Panel]:
    return [
        lines(
            "Replicas missing from scrapes",
            "ops",
            {"{{of_pool}}": ALL.rate("metrics_scrape_failures_total", "of_pool")},
        ),
        lines("Failed updates of metrics", "ops", {"{{pool}}": ALL.rate("metric_errors_total", "pool")}),
        lines("Spans of traces", "ops", {"{{result}}": ALL.rate("trace_spans_total", "result")}),
    ]
