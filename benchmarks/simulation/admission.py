"""Admission by projected memory against "enough free blocks now", on the Azure conversation trace and a small pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.simulation.free_blocks_budget import free_blocks_decode
from benchmarks.simulation.h100_system import MAX_MODEL_LEN, h100_config, h100_costs
from cluster.load.tables import table
from cluster.load.traces import read_trace
from cluster.simulation.report import summarise
from cluster.simulation.simulated_system import DecodeMaker, SimulatedSystem, shipped_decode
from cluster.simulation.system_shape import SystemShape, shape_of
from cluster.simulation.trace_jobs import TraceScale, trace_jobs
from scheduler.admission import AdmissionPolicy

GOODPUT = {"ttft": 2.0, "tpot": 0.025}
# What a chat client asks for without knowing how long its answer will be; the trace's longest is 1,000.
MAX_TOKENS = 1024
WATERMARK = 0.01

POLICIES: dict[str, tuple[AdmissionPolicy, DecodeMaker]] = {
    "free blocks now": (AdmissionPolicy(watermark_fraction=WATERMARK), free_blocks_decode),
    "projected, bound": (AdmissionPolicy(watermark_fraction=WATERMARK), shipped_decode),
    "projected, quantile 0.9": (AdmissionPolicy(0.9, WATERMARK), shipped_decode),
    "projected, quantile 0.5": (AdmissionPolicy(0.5, WATERMARK), shipped_decode),
}


def compare_admission(
    trace: Path, rate_scale: float, duration_s: float, kv_tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The same requests under each policy; preempted ones go to host memory, which is as large as the pool."""
    costs = h100_costs()
    base = shape_of(h100_config(kv_tokens), costs.kv_bytes_per_token)
    entries = read_trace(trace)
    scale = TraceScale(rate=rate_scale, duration_s=duration_s, max_tokens=MAX_TOKENS)
    jobs = trace_jobs(entries, scale, MAX_MODEL_LEN)
    results = {}
    for name, (policy, make_decode) in POLICIES.items():
        shape: SystemShape = replace(base, admission=policy, num_host_blocks=base.decode.limits.num_blocks)
        system = SimulatedSystem(shape, costs, make_decode=make_decode)
        summary = summarise(system, system.run(jobs, sample_interval_s=1.0), GOODPUT)
        results[name] = {key: value for key, value in summary.items() if key not in ("kv_use", "queue")}
        say(f"{name}: {summary['preemptions']} preemptions, p99 TPOT {summary['p99_tpot_ms']:.1f} ms")
    return {"rate_scale": rate_scale, "duration_s": duration_s, "kv_tokens": kv_tokens, "policies": results}


def admission_table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [
            name,
            found["preemptions"],
            found["evictions"],
            *(f"{found[key]:.1f}" for key in ("p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "max_itl_ms")),
            *(f"{found[key]:.0f}" for key in ("p50_ttft_ms", "p99_ttft_ms")),
            f"{100 * found['kv_use_mean']:.0f} %",
            f"{100 * found['goodput_fraction']:.1f} %",
            found["num_prompts"] - found["completed"],
        ]
        for name, found in result["policies"].items()
    ]
    header = ["admission", "preempted", "evicted", "TPOT p50", "TPOT p99", "ITL p99", "ITL max"]
    return table([*header, "TTFT p50", "TTFT p99", "KV use", "goodput", "failed"], rows)
