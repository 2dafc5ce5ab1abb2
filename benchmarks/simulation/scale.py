"""1 to 1,000 decode replicas: what a decision costs, and what each replica delivers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation.h100_system import MAX_MODEL_LEN, h100_config, h100_costs
from cluster.load.tables import table
from cluster.load.traces import read_trace
from cluster.simulation.plot import check_can_plot
from cluster.simulation.report import summarise
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import shape_of
from cluster.simulation.trace_jobs import TraceScale, trace_jobs

GOODPUT = {"ttft": 0.5, "tpot": 0.025}
# One prefill replica computes the prompts of so many decode replicas on this trace.
DECODES_PER_PREFILL = 4


def measure_scale(
    trace: Path, counts: Sequence[int], num_requests: int, is_spread: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """is_spread: the trace as it is, an hour of it, over all replicas. Else as many times its arrivals as there are
    replicas, for as long as that gives num_requests: the load of each replica is the same."""
    entries = read_trace(trace)
    costs = h100_costs()
    rows = []
    for count in counts:
        num_prefill = -(-count // DECODES_PER_PREFILL)
        shape = shape_of(h100_config(), costs.kv_bytes_per_token, (num_prefill, count))
        scale = TraceScale() if is_spread else TraceScale(rate=count, max_requests=num_requests)
        jobs = trace_jobs(
            entries[: max(200, 4 * num_requests // count)] if not is_spread else entries, scale, MAX_MODEL_LEN
        )
        started_s, cpu_s = time.monotonic(), time.process_time()
        system = SimulatedSystem(shape, costs)
        simulated_s = jobs[-1].arrival_s
        summary = summarise(system, system.run(jobs, sample_interval_s=max(1.0, simulated_s / 100)), GOODPUT)
        keys = ("num_prompts", "completed", "routing_us", "scheduling_us", "p50_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")
        row = {key: summary[key] for key in keys} | {
            "decode": count,
            "prefill": num_prefill,
            "trace_s": simulated_s,
            "decode_steps": summary["decode_steps"],
            "goodput_fraction": summary["goodput_fraction"],
            "goodput_per_replica": summary["goodput_fraction"] * len(jobs) / simulated_s / count,
            "wall_s": time.monotonic() - started_s,
            "cpu_s": time.process_time() - cpu_s,
        }
        rows.append(row)
        say(f"{count} decode replicas: {len(jobs)} requests in {row['cpu_s']:.0f} s of CPU")
    return {"is_spread": is_spread, "rows": rows}


def scale_table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [
            row["decode"],
            row["prefill"],
            row["num_prompts"],
            f"{row['trace_s']:.0f}",
            f"{row['routing_us']:.0f}",
            f"{row['scheduling_us']:.0f}",
            f"{row['p50_ttft_ms']:.0f} / {row['p99_ttft_ms']:.0f}",
            f"{row['p99_tpot_ms']:.1f}",
            f"{row['goodput_per_replica']:.3f} ({100 * row['goodput_fraction']:.1f} %)",
            f"{row['decode_steps'] / 1e6:.2f} M",
            f"{row['cpu_s']:.0f}",
        ]
        for row in result["rows"]
    ]
    header = ["decode", "prefill", "requests", "trace s", "routing us", "scheduling us", "TTFT p50 / p99 ms"]
    return table([*header, "TPOT p99 ms", "goodput req/s a replica", "steps", "CPU s"], rows)


def plot_scale(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Cost of a decision and goodput of a replica over the number of replicas. Raises UserError."""
    check_can_plot()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cost, goodput) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for result in results:
        load = "trace spread over all" if result["is_spread"] else "same load for each"
        counts = [row["decode"] for row in result["rows"]]
        cost.plot(counts, [row["routing_us"] for row in result["rows"]], "o-", label=f"routing, {load}")
        cost.plot(counts, [row["scheduling_us"] for row in result["rows"]], "s--", label=f"scheduling, {load}")
        goodput.plot(counts, [row["goodput_per_replica"] for row in result["rows"]], "o-", label=load)
    cost.set(xscale="log", yscale="log", xlabel="decode replicas", ylabel="us a decision")
    goodput.set(xscale="log", yscale="log", xlabel="decode replicas", ylabel="goodput, req/s a replica")
    for axes in (cost, goodput):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=90)
    plt.close(figure)
