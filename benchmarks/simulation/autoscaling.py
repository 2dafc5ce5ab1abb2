"""The autoscaling policy on recorded loads, against Serve's default policy and static splits: hours and attainment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.simulation.h100_system import AZURE_CONVERSATION, h100_costs
from benchmarks.simulation.serve_default_policy import ServeDefaultPolicy, StaticSplit
from cluster.autoscaling.scaling_rules import scaling_rules
from cluster.config.root import Config
from cluster.load.tables import table
from cluster.load.traces import read_trace
from cluster.simulation.client import Client, ClientStatus, Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.plot import check_can_plot
from cluster.simulation.simulated_autoscaler import ScalingPolicy, ShippedPolicy, SimulatedAutoscaler
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import shape_of
from cluster.simulation.trace_jobs import TraceScale, trace_jobs

TPOT_S = 0.15
START_DELAY_S = 45.0
MAX_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace on a machine: one that takes so many times as long for a step as the H100 that was measured, so that an
    hour of the trace takes several replicas. decode_tokens: KV cache of a decode replica. ongoing: targets of Serve's
    policy, tuned by hand: calls in progress that a decode and a prefill replica carry well. ttft_s: the objective;
    Mooncake's is its paper's (FAST'25), as most of its prompts take longer than three seconds by themselves here.
    """

    name: str
    trace: str
    slower: float
    decode_tokens: int
    max_model_len: int
    ongoing: Mapping[str, float]
    ttft_s: float = 3.0


TRACES = AZURE_CONVERSATION.parent
# An eighth of an H100 is about an L4 in speed; the KV caches are those of larger cards.
SCENARIOS = (
    Scenario("Azure conversation", AZURE_CONVERSATION.name, 8.0, 160_000, 8_192, {"decode": 60, "prefill": 2}),
    Scenario("Azure code", "AzureLLMInferenceTrace_code.csv", 8.0, 160_000, 8_192, {"decode": 30, "prefill": 2}),
    Scenario(
        "Mooncake", "mooncake_conversation_trace.jsonl", 4.0, 400_000, 131_072, {"decode": 15, "prefill": 2}, 30.0
    ),
)


def compare_autoscaling(
    scenario: Scenario, folder: Path, duration_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """One row for each policy. folder: of the traces."""
    costs = slower_costs(scenario.slower)
    scale = TraceScale(duration_s=duration_s)
    jobs = trace_jobs(read_trace(folder / scenario.trace), scale, scenario.max_model_len)
    say(f"{scenario.name}: {len(jobs)} requests in {jobs[-1].arrival_s:.0f} s")
    rows: list[dict[str, Any]] = []

    def run(name: str, policy: ScalingPolicy, first: tuple[int, int]) -> dict[str, Any]:
        row = _run(scenario, costs, jobs, policy, first)
        rows.append({"policy": name} | row)
        say(f"  {name}: {row['replica_hours']:.2f} replica-hours, {100 * row['attained']:.1f} %, {row['cpu_s']:.0f} s")
        return row

    rules = scaling_rules(_config(scenario))
    shipped = run("SplitServe", ShippedPolicy(rules), (2, 2))
    run("Serve default, target 2", ServeDefaultPolicy({"prefill": 2.0, "decode": 2.0}, 30.0, 600.0), (2, 2))
    delays_s = rules.decode.up_s, rules.decode.down_s
    run("Serve default, tuned", ServeDefaultPolicy(scenario.ongoing, *delays_s), (2, 2))
    hours = shipped["hours"]
    mean = [max(1, math.ceil(hours[pool] * 3600 / shipped["duration_s"])) for pool in ("prefill", "decode")]
    run("static, the same mean", StaticSplit(), (mean[0], mean[1]))
    peak = [max(sample[column] for sample in shipped["course"]) for column in (1, 2)]
    run("static, its peak", StaticSplit(), (peak[0], peak[1]))
    return {"scenario": scenario.name, "num_requests": len(jobs), "rows": rows}


def slower_costs(factor: float) -> CostModel:
    """The H100's steps, so many times as long."""
    costs = h100_costs()
    return costs.model_copy(update={"decode": costs.decode.slower(factor), "prefill": costs.prefill.slower(factor)})


def _config(scenario: Scenario) -> Config:
    pool = {
        "max_running_sequences": 256,
        "max_batch_tokens": 4096,
        "lag": 1,
        "autoscaling": {"min_replicas": 1, "max_replicas": MAX_REPLICAS},
    }
    tokens = max(scenario.max_model_len, 200_000) // 16 * 16
    return Config.model_validate(
        {
            "model": {"source": "bundled", "max_model_len": scenario.max_model_len},
            "slo": {"ttft_s": scenario.ttft_s, "tpot_s": TPOT_S},
            "ingress": {"max_queued_requests": 100_000, "queue_timeout_s": 120.0},
            "transfer": {"handoff_timeout_s": 120.0},
            "pools": {
                "prefill": pool | {"kv_capacity_tokens": tokens},
                "decode": pool | {"kv_capacity_tokens": scenario.decode_tokens},
            },
        }
    )


def _run(
    scenario: Scenario, costs: CostModel, jobs: Sequence[Job], policy: ScalingPolicy, first: tuple[int, int]
) -> dict[str, Any]:
    cpu_s = time.process_time()
    system = SimulatedSystem(shape_of(_config(scenario), costs.kv_bytes_per_token, first), costs)
    bounds = {"prefill": (1, MAX_REPLICAS), "decode": (1, MAX_REPLICAS)}
    scaler = SimulatedAutoscaler(system, policy, bounds, START_DELAY_S)
    clients = system.run(jobs).clients
    hours = scaler.replica_hours()
    targets = [tuple(sample.targets.values()) for sample in scaler.samples]
    return {
        "hours": hours,
        "replica_hours": sum(hours.values()),
        "attained": sum(_is_good(client, scenario.ttft_s) for client in clients) / len(clients),
        "ttft_attained": sum(c.first_s > 0.0 and c.ttft_s <= scenario.ttft_s for c in clients) / len(clients),
        "lost": sum(client.status is not ClientStatus.FINISHED for client in clients),
        "num_changes": sum(before != after for before, after in pairwise(targets)),
        "duration_s": scaler.samples[-1].time_s,
        "course": [
            (round(s.time_s), s.targets["prefill"], s.targets["decode"], s.running["prefill"], s.running["decode"])
            for s in scaler.samples[::10]
        ],
        "cpu_s": time.process_time() - cpu_s,
    }


def _is_good(client: Client, ttft_s: float) -> bool:
    is_whole = client.status is ClientStatus.FINISHED
    return is_whole and client.ttft_s <= ttft_s and (client.tpot_s is None or client.tpot_s <= TPOT_S)


def autoscaling_table(results: Sequence[dict[str, Any]]) -> str:
    """For people, and for docs/autoscaling.md."""
    rows = [
        [
            result["scenario"],
            row["policy"],
            f"{row['hours']['prefill']:.2f}",
            f"{row['hours']['decode']:.2f}",
            f"{row['replica_hours']:.2f}",
            f"{100 * row['attained']:.1f} %",
            f"{100 * row['ttft_attained']:.1f} %",
            row["lost"],
            row["num_changes"],
        ]
        for result in results
        for row in result["rows"]
    ]
    header = ["trace", "policy", "prefill h", "decode h", "replica-hours", "SLO met", "TTFT met", "lost", "changes"]
    return table(header, rows)


def plot_autoscaling(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Attainment over hours, and the course of each policy that scales. Raises UserError."""
    check_can_plot()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(len(results), 3, figsize=(13, 3.2 * len(results)), constrained_layout=True)
    for result, axes in zip(results, grid.reshape(-1, 3), strict=True):
        for row in result["rows"]:
            axes[0].plot(row["replica_hours"], 100 * row["attained"], "o", label=row["policy"])
        axes[0].set(title=result["scenario"], xlabel="replica-hours", ylabel="SLO met, % of requests")
        axes[0].legend(fontsize="x-small")
        for column, pool in ((1, "prefill"), (2, "decode")):
            for row in result["rows"][:3]:
                minutes = [sample[0] / 60 for sample in row["course"]]
                axes[column].step(minutes, [s[column + 2] for s in row["course"]], where="post", label=row["policy"])
            axes[column].set(xlabel="minutes", ylabel=f"{pool} replicas at work")
            axes[column].legend(fontsize="x-small")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)
    plt.close(figure)
