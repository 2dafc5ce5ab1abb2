"""What became of a leg's attempts so far: how often it failed, and which replicas it avoids from now on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.routing.attempt_failed import AttemptFailed
from cluster.routing.pool_client import ReplicaLost
from cluster.routing.routing_policy import Route
from replicas.messages import CallStatus


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """Includes the attempts before the leg was split. excluded: replicas to avoid."""

    num_failed: int = 0
    excluded: frozenset[str] = frozenset()

    def after(self, failure: AttemptFailed, route: Route, is_search: bool = False) -> AttemptHistory:
        if failure.status is CallStatus.EVICTED:
            # Memory ran short: nobody's fault, and it comes to an end, as every replay adds a token. Not so for a beam
            # search, which begins anew.
            return replace(self, num_failed=self.num_failed + is_search)
        cause = failure.__cause__
        if isinstance(cause, ReplicaLost) and cause.has_left and cause.replica_id not in self.excluded:
            # It was about to leave and had begun nothing. Each leaves once, so that this comes to an end.
            return replace(self, excluded=self.excluded | {cause.replica_id})
        # If it is not known which of the two was at fault, both are avoided.
        at_fault = {cause.replica_id} if isinstance(cause, ReplicaLost) else {route.decode_id, route.prefill_id}
        excluded = self.excluded.union(id_ for id_ in at_fault if id_ is not None)
        return AttemptHistory(self.num_failed + 1, excluded)

    def pause_s(self, first_s: float) -> float:
        """Wait before the next try: first_s, doubled with each failure; half of it after evictions alone."""
        return float(first_s * 2 ** (self.num_failed - 1))
