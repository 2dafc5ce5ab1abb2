"""Small systems to simulate, and figures that can be checked by hand."""

from __future__ import annotations

import random
from dataclasses import replace

from cluster.policies.routing_policy import RoutingRules
from cluster.simulation.client import Job
from cluster.simulation.cost_model import ControlCosts, CostModel, TransferCosts
from cluster.simulation.router_times import RouterTimes
from cluster.simulation.step_model import StepModel
from cluster.simulation.system_shape import PoolShape, SystemShape
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits

# Powers of two: sums of them are exact.
COSTS = CostModel(
    source="made up",
    kv_bytes_per_token=1024,
    decode=StepModel(base_s=2**-7, row_s=2**-10, context_token_s=2**-18, prompt_token_s=2**-14, prompt_pair_s=2**-26),
    prefill=StepModel(base_s=2**-8, prompt_token_s=2**-14, prompt_pair_s=2**-26),
    transfer=TransferCosts(notify_s=2**-10, latency_s=2**-11, bytes_per_s=2**30, swap_bytes_per_s=2**30),
    control=ControlCosts(ingress_s=2**-10, call_s=2**-11, frame_s=2**-12, stream_s=2**-13),
)


def shape(
    num_prefill: int = 1,
    num_decode: int = 1,
    num_blocks: int = 256,
    lag: int = 0,
    max_sequences: int = 16,
    num_routers: int = 1,
    admission: AdmissionPolicy | None = None,
    num_host_blocks: int = 0,
) -> SystemShape:
    """num_prefill 0: colocated."""
    limits = PoolLimits(num_blocks, 16, max_sequences, 256)
    return SystemShape(
        num_routers=num_routers,
        prefill=PoolShape(num_prefill, limits, lag) if num_prefill else None,
        decode=PoolShape(num_decode, limits, lag),
        admission=admission or AdmissionPolicy(),
        num_host_blocks=num_host_blocks,
        max_model_len=num_blocks * 16,
        rules=RoutingRules(bool(num_prefill), 0, False),
        times=RouterTimes(1e4, handoff_timeout_s=1e4, request_timeout_s=1e5, max_queued_requests=10**6),
    )


def impatient(system: SystemShape, queue_s: float, request_s: float) -> SystemShape:
    return replace(system, times=RouterTimes(queue_s, 1.0, request_s, max_queued_requests=12))


def random_jobs(seed: int, count: int, rate_per_s: float, max_tokens: int | None = None) -> list[Job]:
    """Prompts of 1 to 300 tokens, outputs of 1 to 120; a tenth of them a single token."""
    rng = random.Random(seed)
    now_s, jobs = 0.0, []
    for index in range(count):
        now_s += rng.expovariate(rate_per_s)
        output_len = 1 if rng.random() < 0.1 else rng.randint(1, 120)
        jobs.append(Job(index, now_s, rng.randint(1, 300), output_len, max_tokens or output_len))
    return jobs
