"""Many streams at once at a fixed step: tokens a second through the whole path, and through Serve alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.control_path.process_cpu import cpu_by_kind
from benchmarks.control_path.serve_cluster import GREEDY, TOKEN_ID
from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.processes import LoadResult, run_load
from cluster.load.report import latencies_s, percentile

_NEGLIGIBLE_US = 2.0


def streamed_throughput(
    targets: Mapping[str, Target], num_streams: int, num_tokens: int, num_rounds: int
) -> list[dict[str, Any]]:
    """One row a target, the best of its rounds; they take turns. All streams start at once. Blocks."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(num_rounds):
        for name, target in targets.items():
            row = {"path": name, **_run(target, num_streams, num_tokens)}
            if name not in best or row["tokens_per_s"] > best[name]["tokens_per_s"]:
                best[name] = row
    return list(best.values())


def _run(target: Target, num_streams: int, num_tokens: int) -> dict[str, Any]:
    plan = LoadPlan(
        target=target,
        rate_per_s=math.inf,
        num_requests=num_streams,
        inputs=LengthRange(16, 16),
        outputs=LengthRange(num_tokens, num_tokens),
        token_ids=(TOKEN_ID, TOKEN_ID),
        num_warmup=2,
        body=GREEDY,
    )
    before = cpu_by_kind()
    result = run_load(plan)
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in cpu_by_kind().items()}
    cpu_us = _cpu_us(used, result, num_streams * num_tokens)
    return _figures(result, num_streams, num_tokens) | {"cpu_us_per_token": cpu_us}


def _figures(result: LoadResult, num_streams: int, num_tokens: int) -> dict[str, Any]:
    for record in result.records:
        if not record.is_ok or len(record.token_times_s) != num_tokens:
            raise RuntimeError(f"{len(record.token_times_s)} of {num_tokens} tokens: {record.error}")
    latencies = latencies_s(result.records)
    return {
        "streams": num_streams,
        "tokens": num_tokens,
        "tokens_per_s": num_streams * num_tokens / result.duration_s,
        "ttft_p50_ms": 1000 * percentile(latencies["ttft"], 50),
        "itl_p50_ms": 1000 * percentile(latencies["itl"], 50),
        "itl_p99_ms": 1000 * percentile(latencies["itl"], 99),
    }


def _cpu_us(used: dict[str, float], result: LoadResult, num_tokens: int) -> dict[str, float]:
    """CPU time a token by process, the most first: steadier than a rate when others use the machine too."""
    seconds = {name: cpu_s for name, cpu_s in used.items() if name != "other"}
    seconds["client"] = sum(client.cpu_s for client in result.clients)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    microseconds = {name: round(1e6 * cpu_s / num_tokens, 1) for name, cpu_s in ordered}
    return {name: value for name, value in microseconds.items() if value >= _NEGLIGIBLE_US}
