"""What became of a leg's attempts so far: how often it failed, and which replicas it avoids from now on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.policies.routing_policy import Route
from cluster.routing.attempt_failed import AttemptFailed
from cluster.routing.model_binding import OtherModel
from cluster.routing.pool_client import ReplicaLost
from replicas.messages import CallStatus

# Evictions in a row that brought no token. In simulated storms 112 of 2,497 evictions brought none, so that by chance
# some two in a row happen; with the pauses between them, which double, these many last for 13 s.
_MAX_BARREN = 8


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """Includes the attempts before the leg was split. excluded: replicas to avoid. num_barren: evictions since the last
    one that brought a token."""

    num_failed: int = 0
    excluded: frozenset[str] = frozenset()
    num_barren: int = 0

    def after(
        self, failure: AttemptFailed, route: Route, *, is_search: bool = False, has_advanced: bool = True
    ) -> AttemptHistory:
        """has_advanced: the attempt brought a token."""
        if failure.status is CallStatus.EVICTED:
            # Memory ran short: nobody's fault. It comes to an end where replays add tokens; not each does. A beam
            # search begins anew.
            if is_search:
                return replace(self, num_failed=self.num_failed + 1)
            return replace(self, num_barren=0 if has_advanced else self.num_barren + 1)
        cause = failure.__cause__
        if isinstance(cause, OtherModel):
            # Nor is this a fault: another part of the request was quicker. From now on this one goes where that went.
            return self
        if isinstance(cause, ReplicaLost) and cause.has_left and cause.replica_id not in self.excluded:
            # It was about to leave and had begun nothing. Each leaves once, so that this comes to an end.
            return replace(self, excluded=self.excluded | {cause.replica_id})
        # If it is not known which of the two was at fault, both are avoided.
        at_fault = {cause.replica_id} if isinstance(cause, ReplicaLost) else {route.decode_id, route.prefill_id}
        excluded = self.excluded.union(id_ for id_ in at_fault if id_ is not None)
        return AttemptHistory(self.num_failed + 1, excluded, self.num_barren)

    def is_over(self, max_retries: int) -> bool:
        """Whether it has failed as often as it may, or gives way again and again without getting on."""
        return self.num_failed > max_retries or self.num_barren > _MAX_BARREN

    def pause_s(self, first_s: float) -> float:
        """Wait before the next try: first_s, doubled with each failure and each eviction without a token; half of it
        after evictions that brought some."""
        return float(first_s * 2 ** (self.num_failed + self.num_barren - 1))
