"""Which replicas a request goes to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.config.section import OneOf, Section
from cluster.policies.policy_table import POLICIES


class RoutingConfig(Section):
    """Which replicas a request goes to."""

    policy: Annotated[str, OneOf(POLICIES)] = Field(
        default="memory_then_queue",
        description="Which of the replicas that could take a request does. memory_then_queue: decode by the memory "
        "that is free there, prefill by the wait for the prompt's end; both by what their prefix caches have of it. "
        "roles_by_cost: both by the seconds that requests lose, within the objectives of section slo; for pools with "
        "may_also",
    )
    local_prefill_max_tokens: int = Field(
        default=0,
        ge=0,
        description="Prompts of up to this many tokens, without what is in its prefix cache, are computed by the "
        "decode replica itself; 0: none",
    )
    fallback_to_decode: bool = Field(
        default=False,
        description="Let decode replicas compute prompts while no prefill replica lives. false: status 503",
    )
    local_by_cost: bool = Field(
        default=True,
        description="Let a decode replica compute a prompt itself where that costs less time than to have it from a "
        "prefill replica: what waits there, the KV cache's transfer at the rate that was measured between the two, and "
        "whether transfers between them have failed lately, against what streams at decode wait meanwhile. false: only "
        "prompts of up to local_prefill_max_tokens",
    )
    itl_budget_s: float = Field(
        default=0.0,
        ge=0,
        le=60,
        description="With local_by_cost: for so long a stream may wait for its next token beside a prompt without that "
        "counting against the prompt. 0: each wait counts. More lets decode compute more prompts. (slo.tpot_s would be "
        "too much: it is a mean over an answer)",
    )
    other_node_penalty: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="How many times more a prompt counts at a prefill replica that is not on the decode replica's Ray "
        "node (a pod is one), until a transfer between the two has been measured. For pools over several nodes whose "
        "KV moves by TCP: how often computing a prompt goes into the time of its transfer. 0: nodes do not matter",
    )
    quarantine_after_deaths: int = Field(
        default=3,
        ge=2,
        le=100,
        description="After how many deaths of replicas that computed a request, without its getting any further, it is "
        "taken to be why; the last time it is tried alone among its like. It is refused then (status 500, code "
        "quarantined), and so is its like for ten minutes. A replica that freezes or whose engine fails counts. With "
        "ingress.max_retries below this less one it ends before",
    )
