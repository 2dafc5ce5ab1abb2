"""One dashboard for looking at replicas side by side, or at a single one."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Panel, Source, lines, new_dashboard, variable

ONE = Source('namespace=~"$namespace", model_name=~"$model_name", replica=~"$replica"')
_ENGINE = 'pool=~"prefill|decode"'
_BY = "replica"
_NAME = "{{replica}}"


def replica() -> dashboard.Dashboard:
    query = 'label_values(splitserve_build_info{namespace=~"$namespace", model_name=~"$model_name"}, replica)'
    board = new_dashboard(
        "splitserve-replica", "SplitServe / Replicas", "What each replica holds and does.", ["replica"]
    )
    board = board.with_variable(variable("replica", "Replica", query))
    rows = {
        "Work": _work(),
        "Guessed tokens": _drafts(),
        "KV memory": _memory(),
        "KV handoff": _handoff(),
        "Ingress": _ingress(),
    }
    for title, panels in rows.items():
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board


def _work() -> list[Panel]:
    return [
        lines("Requests in flight", "short", {_NAME: ONE.sum("requests_in_flight", _BY, _ENGINE)}),
        lines("Requests waiting", "short", {_NAME: ONE.sum("requests_queued", _BY, _ENGINE)}),
        lines("Wait for admission, mean", "s", {_NAME: ONE.mean("queue_time_seconds", _BY)}),
        lines("Step time, mean", "s", {_NAME: ONE.mean("step_seconds", _BY)}),
        lines("Step time, p99", "s", {_NAME: ONE.quantile(0.99, "step_seconds", _BY)}),
        lines(
            "Busy with steps", "percentunit", {_NAME: ONE.rate("step_seconds_sum", _BY)}, "Seconds of steps a second."
        ),
        lines("Prompt tokens computed", "ops", {_NAME: ONE.rate("prefilled_tokens_total", _BY)}),
        lines("Output tokens computed", "ops", {_NAME: ONE.rate("forwarded_tokens_total", _BY)}),
        lines("Surplus tokens", "ops", {_NAME: ONE.rate("surplus_tokens_total", _BY)}, "Sampled and dropped."),
    ]


def _drafts() -> list[Panel]:
    drafted, accepted = "speculative_drafted_tokens_total", "speculative_accepted_tokens_total"
    by_place = f"{ONE.rate(accepted, 'position')} / ({ONE.rate(drafted, 'position')} > 0)"
    each = f"{ONE.rate(accepted, _BY)} / ({ONE.rate('forwarded_tokens_total', _BY)} > 0)"
    return [
        lines("Guessed right, by place", "percentunit", {"{{position}}": by_place}, "Behind the last known token."),
        lines("Output tokens that were guessed", "percentunit", {_NAME: each}),
        lines(
            "Steps by their guesses",
            "ops",
            {"{{drafts}}": ONE.rate("speculative_steps_total", "drafts")},
            "The most for one sequence; 0: it would not have paid.",
            stacked=True,
        ),
    ]


def _memory() -> list[Panel]:
    return [
        lines("KV cache in use", "percentunit", {_NAME: ONE.sum("kv_cache_usage_ratio", _BY)}),
        lines("Blocks by state", "short", {"{{state}}": ONE.sum("kv_blocks", "state")}, stacked=True),
        lines(
            "Prompt tokens looked up in the prefix cache",
            "ops",
            {"{{result}}": ONE.rate("prefix_tokens_total", "result")},
            stacked=True,
        ),
        lines("Preemptions", "ops", {"{{replica}}: {{kind}}": ONE.rate("preemptions_total", "replica, kind")}),
    ]


def _handoff() -> list[Panel]:
    return [
        lines("Transfer time, mean", "s", {_NAME: ONE.mean("kv_transfer_seconds", _BY)}),
        lines("Bytes read", "Bps", {_NAME: ONE.rate("kv_transfer_bytes_total", _BY)}),
        lines("Transfers by result", "ops", {"{{result}}": ONE.rate("kv_transfers_total", "result")}),
        lines(
            "Transfers open",
            "short",
            {"{{replica}}: {{state}}": ONE.sum("kv_transfers_open", "replica, state")},
        ),
        lines("Transfer faults", "ops", {"{{kind}}": ONE.rate("kv_transfer_errors_total", "kind")}),
        lines(
            "Rate of each pair",
            "Bps",
            {"{{replica}} from {{peer}}": ONE.sum("kv_transfer_rate_bytes_per_second", "replica, peer")},
            "Measured when two replicas meet, then by their reads.",
        ),
    ]


def _ingress() -> list[Panel]:
    return [
        lines("Requests", "reqps", {_NAME: ONE.rate("requests_total", _BY)}),
        lines("Time to first token, p95", "s", {_NAME: ONE.quantile(0.95, "time_to_first_token_seconds", _BY)}),
        lines("Tokens generated", "ops", {_NAME: ONE.rate("generation_tokens_total", _BY)}),
    ]
