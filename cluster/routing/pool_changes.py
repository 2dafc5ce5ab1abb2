"""Tells of replicas that have gone, whatever for: killed, scaled down, replaced."""

from __future__ import annotations

import logging
from collections.abc import Collection

logger = logging.getLogger(__name__)


class PoolChanges:
    """One per ingress, on its event loop."""

    def __init__(self) -> None:
        self._present: dict[str, frozenset[str]] = {}

    def look(self, pool: str, replica_ids: Collection[str]) -> None:
        """These are the pool's replicas now."""
        before, self._present[pool] = self._present.get(pool, frozenset()), frozenset(replica_ids)
        for name in sorted(before - self._present[pool]):
            extra = {"event": "replica_gone", "pool": pool, "replica": name, "left": len(replica_ids)}
            logger.info("%s replica %s has gone, %d left", pool, name, len(replica_ids), extra=extra)
