"""Bursts that order replicas: refused while these start, as it was; waiting for them; and moving to them too."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.autoscaling import TPOT_S, slower_costs
from cluster.autoscaling.scaling_rules import scaling_rules
from cluster.config.root import Config
from cluster.load.percentile import percentile
from cluster.load.tables import table
from cluster.simulation.client import ClientStatus, Job
from cluster.simulation.simulated_autoscaler import ShippedPolicy, SimulatedAutoscaler
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import shape_of

START_S = 45.0
MAX_REPLICAS = 4
# An eighth of an H100; one replica's KV cache holds some thirty of these requests.
SLOWER, DECODE_TOKENS = 8.0, 32_000


@dataclass(frozen=True, slots=True)
class Burst:
    """So many at once, each of so many tokens, in front of one replica of each pool; and if they come again and again,
    how long after the one before."""

    name: str
    num_requests: int
    prompt_len: int
    output_len: int
    every_s: float = 0.0
    num_times: int = 1
    decode_tokens: int = DECODE_TOKENS

    def jobs(self) -> list[Job]:
        times = [
            self.every_s * turn + 0.01 * index for turn in range(self.num_times) for index in range(self.num_requests)
        ]
        return [
            Job(index, time_s, self.prompt_len, self.output_len, self.output_len)
            for index, time_s in enumerate(sorted(times))
        ]


BURSTS = (
    Burst("100 at once", 100, 500, 500),
    Burst("200 at once", 200, 500, 500),
    Burst("100 every 5 minutes", 100, 500, 500, every_s=300.0, num_times=6),
    Burst("100 long prompts", 100, 4000, 100),
    Burst("300 for prefill alone", 300, 2000, 50, decode_tokens=1_000_000),
)


@dataclass(frozen=True, slots=True)
class Way:
    """waits: for replicas on their way. moves: to those that have room."""

    name: str
    waits: bool
    moves: bool


WAYS = (Way("refused, as before", False, False), Way("they wait", True, False), Way("they wait and move", True, True))


def compare_bursts(say: Callable[[str], None]) -> dict[str, Any]:
    """One row for each burst and way."""
    rows = []
    for burst in BURSTS:
        for way in WAYS:
            row = {"burst": burst.name, "way": way.name} | _run(burst, way)
            rows.append(row)
            say(f"{burst.name}, {way.name}: {row['lost']} lost, {row['cpu_s']:.0f} s")
    return {"rows": rows}


def _config(burst: Burst) -> Config:
    scaling = {"min_replicas": 1, "max_replicas": MAX_REPLICAS}
    pool = {"max_running_sequences": 256, "max_batch_tokens": 4096, "lag": 1, "autoscaling": scaling}
    return Config.model_validate(
        {
            "model": {"source": "bundled", "max_model_len": 8_192},
            "slo": {"ttft_s": 3.0, "tpot_s": TPOT_S},
            "ingress": {"max_queued_requests": 1_000},
            "pools": {
                "prefill": pool | {"kv_capacity_tokens": 200_000},
                "decode": pool | {"kv_capacity_tokens": burst.decode_tokens},
            },
        }
    )


def _run(burst: Burst, way: Way) -> dict[str, Any]:
    cpu_s = time.process_time()
    config, costs = _config(burst), slower_costs(SLOWER)
    shape = shape_of(config, costs.kv_bytes_per_token, (1, 1))
    shape = replace(shape, times=replace(shape.times, settle_s=shape.times.settle_s if way.moves else math.inf))
    system = SimulatedSystem(shape, costs)
    policy = ShippedPolicy(scaling_rules(config))
    bounds = {"prefill": (1, MAX_REPLICAS), "decode": (1, MAX_REPLICAS)}
    scaler = SimulatedAutoscaler(system, policy, bounds, START_S, tells_routers=way.waits)
    clients = system.run(burst.jobs()).clients
    whole = [client for client in clients if client.status is ClientStatus.FINISHED]
    waits_s = sorted(client.ttft_s for client in whole)
    steps = {name: engine.counts.num_steps for name, engine in {**system.decodes, **system.prefills}.items()}
    return {
        "lost": len(clients) - len(whole),
        "ends": dict(Counter(client.status.value for client in clients)),
        "ttft_p50_s": percentile(waits_s, 50),
        "ttft_p99_s": percentile(waits_s, 99),
        "last_s": max(client.last_s for client in whole),
        "came": len(steps) - 2,
        "came_steps": sum(count for name, count in steps.items() if not name.endswith("-0000")),
        "moved": sum(router.waits.num_moves for router in system.routers),
        "replica_hours": sum(scaler.replica_hours().values()),
        "cpu_s": time.process_time() - cpu_s,
    }


def bursts_table(rows: Sequence[dict[str, Any]]) -> str:
    """For people, and for docs/autoscaling.md."""
    header = ["burst", "way", "lost", "TTFT p50 s", "p99 s", "all done s", "came", "their steps", "moved", "hours"]
    return table(
        header,
        [
            [
                row["burst"],
                row["way"],
                row["lost"],
                f"{row['ttft_p50_s']:.1f}",
                f"{row['ttft_p99_s']:.1f}",
                f"{row['last_s']:.0f}",
                row["came"],
                row["came_steps"],
                row["moved"],
                f"{row['replica_hours']:.2f}",
            ]
            for row in rows
        ],
    )
