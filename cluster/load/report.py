"""Figures of a run, under the names of `vllm bench serve`, as a table and as JSON. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.load.load_plan import LoadPlan
from cluster.load.percentile import percentile
from cluster.load.processes import LoadResult
from cluster.load.request_record import RequestRecord
from cluster.load.tables import table

PERCENTILES = (50, 90, 95, 99)
# Above these the client may be what is measured.
BUSY_CLIENT_CORES = 0.8
LATE_CLIENT_MS = 10.0

_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def summarise(plan: LoadPlan, result: LoadResult, goodput: dict[str, float]) -> dict[str, Any]:
    """Everything about a run but its requests one by one. Latencies are those of requests that succeeded."""
    good = [record for record in result.records if record.is_ok]
    duration_s = result.duration_s
    num_input = sum(record.num_input_tokens for record in good)
    num_output = sum(record.num_output_tokens for record in good)
    summary: dict[str, Any] = {
        "model_id": plan.target.model,
        "endpoint": plan.target.path,
        "num_prompts": len(result.records),
        "arrival": str(plan.arrival),
        "request_rate": "inf" if plan.rate_per_s == math.inf else plan.rate_per_s,
        "burstiness": plan.burstiness,
        "trace": plan.trace.path.name if plan.trace else None,
        "seed": plan.seed,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(result.records) - len(good),
        "errors": dict(Counter(record.error for record in result.records if record.error is not None).most_common(10)),
        "short_outputs": sum(record.num_output_tokens < record.num_wanted_tokens for record in good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    summary |= _goodput(result.records, duration_s, goodput)
    for name, values_s in latencies_s(good).items():
        summary |= _statistics(name, [value_s * 1000 for value_s in values_s])
    late_ms = [record.late_s * 1000 for record in result.records]
    summary |= {
        "client_processes": len(result.clients),
        "client_cpu_cores": [round(client.cores, 3) for client in result.clients],
        "p99_client_late_ms": percentile(late_ms, 99),
        "max_client_late_ms": max(late_ms, default=math.nan),
    }
    return summary


def latencies_s(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Every latency in seconds, by metric; those that a request does not have are left out."""
    return {
        "ttft": [value for record in records if (value := record.ttft_s) is not None],
        "tpot": [value for record in records if (value := record.tpot_s) is not None],
        "itl": [value for record in records for value in record.itl_s],
        "e2el": [record.e2el_s for record in records],
    }


def warnings(summary: dict[str, Any]) -> list[str]:
    """Why this run's figures should not be trusted as they are."""
    found = []
    if summary["failed"]:
        found.append(f"{summary['failed']} requests failed; latencies are those of the others")
    if summary["short_outputs"]:
        found.append(f"{summary['short_outputs']} answers had fewer tokens than asked for")
    if max(summary["client_cpu_cores"], default=0) > BUSY_CLIENT_CORES:
        found.append("a client process used most of a core: use more --processes")
    if summary["p99_client_late_ms"] > LATE_CLIENT_MS:
        found.append(f"1 % of requests left the client {summary['p99_client_late_ms']:.0f} ms or more after their time")
    return found


def as_text(summary: dict[str, Any]) -> str:
    """A table for people."""
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = []
    for name, title in _METRICS.items():
        if f"mean_{name}_ms" in summary:
            rows.append([f"{title} ms", *(f"{summary[f'{column}_{name}_ms']:.1f}" for column in columns)])
    lines = [
        f"{summary['completed']} of {summary['num_prompts']} requests in {summary['duration']:.2f} s: "
        f"{summary['request_throughput']:.2f} req/s, {summary['output_throughput']:.1f} output tok/s, "
        f"{summary['total_token_throughput']:.1f} tok/s in all",
    ]
    if rows:
        lines.append(table(["", *columns], rows))
    if summary["goodput_limits_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary["goodput_limits_ms"].items())
        good = f"{summary['request_goodput']:.2f} req/s, {100 * summary['goodput_fraction']:.1f} % of requests"
        lines.append(f"goodput ({limits}): {good}")
    cores = " ".join(f"{cores:.2f}" for cores in summary["client_cpu_cores"])
    lines.append(f"client: {cores} cores, p99 {summary['p99_client_late_ms']:.1f} ms late")
    lines += [f"{count} x {error}" for error, count in summary["errors"].items()]
    lines += [f"WARNING: {warning}" for warning in warnings(summary)]
    return "\n".join(lines)


def _goodput(records: Sequence[RequestRecord], duration_s: float, goodput: dict[str, float]) -> dict[str, Any]:
    """Requests that succeeded within every limit, a second and as a share of all sent (failed ones included)."""
    num_good = sum(record.meets(goodput) for record in records)
    return {
        "goodput_limits_ms": {name: limit_s * 1000 for name, limit_s in goodput.items()},
        "request_goodput": num_good / duration_s if goodput else None,
        "goodput_fraction": num_good / len(records) if goodput and records else None,
    }


def _statistics(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    statistics = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
    }
    statistics |= {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}
    return statistics | {f"max_{name}_ms": max(values)}
