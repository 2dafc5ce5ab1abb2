"""What is logged of scaling, in Serve's controller: through Serve's own logger, the only one there is set up."""

from __future__ import annotations

import logging


def log_scaling(name: str, before: int, after: int, cause: str) -> None:
    """One sentence: `decode 1 -> 3 (455 KV blocks waiting)`. By its first word cluster.terminal knows it."""
    logger = logging.getLogger("ray.serve.splitserve")
    logger.setLevel(logging.INFO)  # that of Serve's is WARNING: of its own changes it says much
    logger.info("autoscaling: %s %d -> %d (%s)", name, before, after, cause)
