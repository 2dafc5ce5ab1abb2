"""Which pool a replica is in: with `may_also` both parts of a request may go to either."""

from __future__ import annotations

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Route
from cluster.routing.pool_view import PoolView, able
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.watched_pool import WatchedPool
from replicas.messages import EngineLoad


class PoolFinder:
    """One per router, on its event loop."""

    def __init__(
        self, decode: WatchedPool, prefill: WatchedPool | None, view: PoolView, metrics: IngressMetrics
    ) -> None:
        self._decode, self._prefill, self._view, self._metrics = decode, prefill, view, metrics

    def of(self, replica_id: str) -> WatchedPool:
        """The one that it is in, or was: where nobody knows it, calls say that it has gone."""
        if self._prefill is None or replica_id in self._decode.replicas():
            return self._decode
        is_known = replica_id in self._prefill.replicas() or self._view.was_of_prefill(replica_id)
        return self._prefill if is_known else self._decode

    def away(self) -> ReplicaTable:
        """Of the prefill pool those that may also generate, and so send tokens too."""
        return able(self._prefill.replicas()) if self._prefill is not None else {}

    def heard(self, replica_id: str, load: EngineLoad) -> None:
        """A frame of it has come."""
        self.of(replica_id).heard(replica_id, load)

    def note(self, route: Route) -> None:
        """Counts who plays which role."""
        self._metrics.played(self.of(route.decode_id).name, "decode")
        self._metrics.played(self.of(route.prefill_id or route.decode_id).name, "prefill")
