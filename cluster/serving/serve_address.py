"""Where Ray Serve listens, and where the config says: deploying a file does not move a Serve that runs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cluster.http.server_address import base_url, is_elsewhere

if TYPE_CHECKING:
    from cluster.config.service import ServerConfig

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


async def warn_if_elsewhere(wanted: ServerConfig) -> None:
    """Into the log: Serve itself only warns of it where nobody looks. Raises nothing; within seconds."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            # On a thread: without a GCS it blocks.
            controller: Any = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
            found = await controller.get_http_config.remote()
    except (ValueError, ray.exceptions.RayError, TimeoutError) as error:  # it is starting anew: serve all the same
        logger.warning("Serve's address unknown", extra={"event": "address_unknown", "reason": repr(error)})
        return
    if is_elsewhere(wanted.host, wanted.port, found.host, found.port):
        logger.error(
            "server.host, server.port: Serve runs at another address and stays there until it is started anew",
            extra={
                "event": "wrong_address",
                "config": base_url(wanted.host, wanted.port),
                "ray": base_url(found.host or "", found.port),
            },
        )
