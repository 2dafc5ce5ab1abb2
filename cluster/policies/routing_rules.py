"""What the config says of how requests are routed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """The config's section `routing`, and has_prefill_pool: false when colocated.

    other_node_penalty: a prompt counts so many times more at a prefill replica on another node than decode's, until
    the pair has been measured. policy: a name in `policies.policy_table`. local_by_cost: decode computes what that
    costs less. itl_budget_s: for so long a stream's next token may take beside a prompt without its counting.
    quarantine_after_deaths: of replicas that died while they computed a request, without its getting any further.
    ttft_s, tpot_s: the objectives, of the section `slo`.
    """

    has_prefill_pool: bool
    local_prefill_max_tokens: int
    fallback_to_decode: bool
    other_node_penalty: float = 0.0
    policy: str = "memory_then_queue"
    local_by_cost: bool = True
    itl_budget_s: float = 0.0
    quarantine_after_deaths: int = 3
    ttft_s: float = 2.0
    tpot_s: float = 0.1
