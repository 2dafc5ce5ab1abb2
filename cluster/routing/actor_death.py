"""Ray's word on whether a replica's process has ended. A broken connection does not tell."""

from __future__ import annotations

import asyncio
from typing import Any

_ASK_S = 1.0


async def has_died(actor_name: str) -> bool:
    """Of a replica of Serve, by the actor's name in its metadata. Waits for a moment at most.

    In doubt it has not: one that leaves still ends what it has begun, perhaps for others.
    """
    import ray
    from ray.exceptions import ActorDiedError
    from ray.serve._private.constants import SERVE_NAMESPACE

    try:
        async with asyncio.timeout(_ASK_S):
            actor: Any = await asyncio.to_thread(ray.get_actor, actor_name, SERVE_NAMESPACE)
            # Answered, or failed only once Ray knows: what is known of the actor lags behind its end.
            await actor.__ray_ready__.remote()
    except (ActorDiedError, ValueError):  # the latter: there is none of this name any more
        return True
    except Exception:  # nobody knows, or not in time
        return False
    return False
