"""Handoffs in parts, in the simulator: how long after its first token a long prompt's second one comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.load.tables import table
from cluster.policies.routing_policy import RoutingRules
from cluster.simulation.client import Job
from cluster.simulation.cost_model import CostModel, load_costs
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.system_shape import PoolShape, SystemShape
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

STEP_TIMES = Path(__file__).parents[1] / "step_times" / "llama-3.1-8b-h200.json"
NETWORKS = {"100 Gb/s": 12.5e9, "400 Gb/s": 50e9, "NVLink": 245e9}
STEP_TOKENS = (2048, 4096, 8192, 16_384)
_BLOCK_SIZE = 16


def compare_parts(prompt_len: int, step_tokens: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """One prompt on an idle pair of H200, its chunks of so many tokens, and in one step: without parts all of it would
    wait for that read."""
    costs = load_costs(STEP_TIMES)
    rows: list[dict[str, Any]] = []
    for network, bytes_per_s in NETWORKS.items():
        of_network = costs.model_copy(
            update={"transfer": costs.transfer.model_copy(update={"bytes_per_s": bytes_per_s})}
        )
        for size in (*step_tokens, prompt_len):
            first_s, gap_s = first_two_tokens(of_network, prompt_len, size)
            rows.append({"network": network, "step_tokens": size, "first_s": first_s, "second_after_s": gap_s})
    heads = ["network", "tokens a step", "first token, ms", "second after it, ms"]
    lines = [
        [row["network"], row["step_tokens"], f"{row['first_s'] * 1e3:.0f}", f"{row['second_after_s'] * 1e3:.1f}"]
        for row in rows
    ]
    say(table(heads, lines))
    return {"prompt_len": prompt_len, "rows": rows}


def first_two_tokens(costs: CostModel, prompt_len: int, step_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and from there to the second one, at the client of an idle system."""
    num_blocks = 2 * (prompt_len // _BLOCK_SIZE + 1)
    decode, prefill = (PoolLimits(num_blocks, _BLOCK_SIZE, 16, size) for size in (2048, step_tokens))
    shape = SystemShape(
        num_routers=1,
        prefill=PoolShape(1, prefill, 1),
        decode=PoolShape(1, decode, 1),
        admission=AdmissionPolicy(),
        num_host_blocks=0,
        max_model_len=num_blocks * _BLOCK_SIZE,
        rules=RoutingRules(True, 0, False),
        times=RouterTimes(1e4, handoff_timeout_s=1e4, request_timeout_s=1e5, max_queued_requests=10),
    )
    (client,) = SimulatedSystem(shape, costs).run([Job(0, 0.0, prompt_len, 2, 2)]).clients
    return client.ttft_s, client.last_s - client.first_s
