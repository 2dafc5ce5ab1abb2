"""Figures of a simulated run, under the names of `splitserve bench`, as a table and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.load.percentile import percentile
from cluster.simulation.client import Client, ClientStatus
from cluster.simulation.simulated_system import SimulatedSystem, SystemRun

PERCENTILES = (50, 90, 95, 99)
_TITLES = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2E ms"}


def summarise(system: SimulatedSystem, run: SystemRun, goodput: dict[str, float]) -> dict[str, Any]:
    """Plain data. goodput: limits in seconds. Latencies are those of requests that finished."""
    finished = [client for client in run.clients if client.status is ClientStatus.FINISHED]
    start_s = run.clients[0].job.arrival_s if run.clients else 0.0
    duration_s = max((client.last_s for client in finished), default=start_s) - start_s
    num_good = sum(_is_good(client, goodput) for client in finished)
    shape = system.shape
    summary: dict[str, Any] = {
        "replicas": {"ingress": shape.num_routers, "prefill": len(system.prefills), "decode": len(system.decodes)},
        "num_prompts": len(run.clients),
        "completed": len(finished),
        "not_completed": dict(Counter(str(c.status) for c in run.clients if c.status is not ClientStatus.FINISHED)),
        "duration": duration_s,
        "total_input_tokens": sum(client.job.prompt_len for client in finished),
        "total_output_tokens": sum(client.num_tokens for client in finished),
        "request_throughput": _ratio(len(finished), duration_s),
        "output_throughput": _ratio(sum(client.num_tokens for client in finished), duration_s),
        "goodput_limits_ms": {name: 1000 * limit_s for name, limit_s in goodput.items()},
        "request_goodput": _ratio(num_good, duration_s) if goodput else None,
        "goodput_fraction": _ratio(num_good, len(run.clients)) if goodput else None,
    }
    for name, values_s in _latencies_s(finished).items():
        summary |= _statistics(name, values_s)
    if len(run.gaps):
        summary |= {f"p{p}_itl_ms": 1000 * run.gaps.percentile(p) for p in PERCENTILES}
        summary |= {"mean_itl_ms": 1000 * run.gaps.mean_s(), "max_itl_ms": 1000 * run.gaps.max_s}
    return summary | _memory(system, run) | _costs(system, duration_s)


def as_text(summary: dict[str, Any]) -> str:
    """For people."""
    replicas = ", ".join(f"{count} {pool}" for pool, count in summary["replicas"].items())
    lines = [
        f"{summary['completed']} of {summary['num_prompts']} requests in {summary['duration']:.1f} simulated s on "
        f"{replicas}: {summary['request_throughput']:.2f} req/s, {summary['output_throughput']:.1f} output tok/s"
    ]
    lines += [f"{count} x {status}" for status, count in summary["not_completed"].items()]
    lines.append(f"{'':8} {'mean':>9} " + " ".join(f"{f'p{percent}':>9}" for percent in PERCENTILES) + f" {'max':>9}")
    for name, title in _TITLES.items():
        if f"mean_{name}_ms" in summary:
            columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
            lines.append(f"{title:8} " + " ".join(f"{summary[f'{column}_{name}_ms']:9.2f}" for column in columns))
    if summary["goodput_limits_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary["goodput_limits_ms"].items())
        good = f"{summary['request_goodput']:.2f} req/s, {100 * summary['goodput_fraction']:.1f} % of requests"
        lines.append(f"goodput ({limits}): {good}")
    lines += [
        f"preemptions {summary['preemptions']}, evictions {summary['evictions']}, stalls {summary['stalls']}; "
        f"routes that had to wait {summary['routes_that_waited']}",
        f"KV of decode in use: mean {100 * summary['kv_use_mean']:.1f} %, most of one replica "
        f"{100 * summary['kv_use_max']:.1f} %; busy: decode {100 * summary['decode_busy']:.1f} %, "
        f"prefill {100 * summary['prefill_busy']:.1f} %",
        f"{summary['decode_steps']} decode steps, {summary['skipped_steps']} of them taken many at once; cost of a "
        f"decision: routing {summary['routing_us']:.0f} us, scheduling {summary['scheduling_us']:.0f} us",
    ]
    if summary["drafted_tokens"]:
        lines.append(f"guessed ahead: {summary['drafted_tokens']} tokens, {summary['accepted_tokens']} of them right")
    return "\n".join(lines)


def _latencies_s(clients: Sequence[Client]) -> dict[str, list[float]]:
    return {
        "ttft": [client.ttft_s for client in clients],
        "tpot": [value for client in clients if (value := client.tpot_s) is not None],
        "e2el": [client.e2el_s for client in clients],
    }


def _is_good(client: Client, goodput: dict[str, float]) -> bool:
    """As cluster.load: a metric that a request does not have is within its limit."""
    values = {"ttft": client.ttft_s, "tpot": client.tpot_s, "e2el": client.e2el_s}
    return all((value := values[name]) is None or value <= limit_s for name, limit_s in goodput.items())


def _statistics(name: str, values_s: list[float]) -> dict[str, float]:
    if not values_s:
        return {}
    statistics = {f"p{percent}_{name}_ms": 1000 * percentile(values_s, percent) for percent in PERCENTILES}
    mean_ms = 1000 * math.fsum(values_s) / len(values_s)
    return statistics | {f"mean_{name}_ms": mean_ms, f"max_{name}_ms": 1000 * max(values_s)}


def _memory(system: SimulatedSystem, run: SystemRun) -> dict[str, Any]:
    schedulers = [decode.scheduler for decode in system.decodes.values()]
    return {
        "preemptions": sum(scheduler.preemption.num_swapped for scheduler in schedulers),
        "evictions": sum(scheduler.preemption.num_evicted for scheduler in schedulers),
        "stalls": sum(scheduler.num_stalls for scheduler in schedulers),
        "routes_that_waited": sum(router.counts.num_waited for router in system.routers),
        "kv_use_mean": _ratio(math.fsum(sample.decode_mean for sample in run.samples), len(run.samples)),
        "kv_use_max": max((sample.decode_max for sample in run.samples), default=0.0),
        "kv_use": [
            [round(s.time_s, 3), round(s.decode_mean, 4), round(s.decode_max, 4), round(s.prefill_mean, 4)]
            for s in run.samples
        ],
        "queue": [[round(s.time_s, 3), s.num_running, s.num_queued] for s in run.samples],
    }


def _costs(system: SimulatedSystem, duration_s: float) -> dict[str, Any]:
    """routing_us, scheduling_us: CPU time of a decision on this machine; an iteration's admit, plan and commit."""
    decodes, prefills = list(system.decodes.values()), list(system.prefills.values())
    num_routed = sum(router.counts.num_decisions for router in system.routers)
    num_planned = sum(engine.counts.num_decisions for engine in decodes)
    drafts = [engine.scheduler.drafts.counts for engine in decodes if engine.scheduler.drafts is not None]
    return {
        "decode_steps": sum(engine.counts.num_steps for engine in decodes),
        "skipped_steps": sum(engine.counts.num_skipped_steps for engine in decodes),
        "decode_busy": _ratio(math.fsum(e.counts.busy_s for e in decodes), len(decodes) * duration_s),
        "prefill_busy": _ratio(math.fsum(e.counts.busy_s for e in prefills), len(prefills) * duration_s),
        "drafted_tokens": sum(sum(counts.drafted) for counts in drafts),
        "accepted_tokens": sum(sum(counts.accepted) for counts in drafts),
        "mean_rows": _ratio(sum(e.counts.num_rows for e in decodes), sum(e.counts.num_steps for e in decodes)),
        "routing_us": 1e6 * _ratio(math.fsum(r.counts.decision_s for r in system.routers), num_routed),
        "scheduling_us": 1e6 * _ratio(math.fsum(e.counts.decision_s for e in decodes), num_planned),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
