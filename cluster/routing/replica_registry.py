"""Which replicas each pool has now, with the metadata they published. Fed by Ray Serve, read by the router.

The one module global of the project: Ray builds `RegistryFeed` itself, by value and in every process that
holds a handle, so what it learns must land where both it and our router can reach it by import.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

ReplicaTable = Mapping[str, Mapping[str, Any]]
Listener = Callable[[str, ReplicaTable], None]


class ReplicaRegistry:
    """Replica id -> metadata, per deployment name. Thread-safe: Serve's router loop is a thread of its own.

    Nobody sees a table before all listeners were told of it, nor are they told of an older one behind it. Else a router
    could send something to a replica whose frames it does not let in yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while listeners are told
        self._tables: dict[str, ReplicaTable] = {}
        self._listeners: list[Listener] = []

    def update(self, deployment: str, replicas: ReplicaTable) -> None:
        """Replace one deployment's table and tell the listeners, on the caller's thread.

        A replica that has published nothing (Serve's default is an empty dict) can't be routed to: it is left out.
        """
        table = {replica_id: metadata for replica_id, metadata in replicas.items() if metadata}
        with self._lock:
            self._tables[deployment] = table
            for listener in self._listeners:
                try:
                    listener(deployment, table)
                except Exception:  # of an ingress that has ended, for example; Serve's own loop and the others go on
                    logger.exception("replicas: a listener failed", extra={"event": "listener_failed"})

    def replicas(self, deployment: str) -> ReplicaTable:
        with self._lock:
            return self._tables.get(deployment, {})

    def listen(self, listener: Listener) -> None:
        """Call `listener(deployment, table)` at each update, and now for each table there is. It must not block, nor
        ask for a table."""
        with self._lock:
            self._listeners.append(listener)
            for deployment, table in self._tables.items():
                listener(deployment, table)


REGISTRY = ReplicaRegistry()
