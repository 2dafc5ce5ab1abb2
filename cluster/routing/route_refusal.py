"""What a client is told when there is no route for its request."""

from __future__ import annotations

from typing import NoReturn

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Need, NeverFits, Unavailable


def refuse(decided: NeverFits | Unavailable, need: Need, metrics: IngressMetrics) -> NoReturn:
    """Counts it and raises ApiError: 400 for what can never fit, 503 for a pool without replicas."""
    if isinstance(decided, NeverFits):
        metrics.rejected("too_long")
        size = need.block_size
        raise ApiError(
            400,
            f"this request needs {decided.needed_blocks * size} tokens of KV memory ({need.prompt_tokens} prompt "
            f"tokens, max_tokens {need.max_tokens}, {need.num_choices} choices), the largest {decided.pool} replica "
            f"has {decided.largest_pool_blocks * size}; send a shorter prompt or a smaller max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    metrics.rejected("no_capacity")
    which = " of the model that began this answer" if need.model else ""
    raise ApiError(
        503,
        f"no {decided.pool} replica is available now{which}; try again later",
        code="unavailable",
        retry_after_s=1.0,
    )
