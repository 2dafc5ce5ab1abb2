"""Replicas that can't work with this ingress or with the other pool, as their models differ: found, barred, told of."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.routing.replica_registry import ReplicaTable
from replicas.model_identity import ModelIdentity

logger = logging.getLogger(__name__)


class Unlikeness(StrEnum):
    TOKENIZER = "tokenizer"  # its token ids stand for other texts than this ingress's: it gets no requests
    NO_PARTNER = "no_partner"  # nobody of the other pool can exchange KV with it


@dataclass(frozen=True, slots=True)
class UnlikeReplica:
    """parts: what of the models differs, from the most similar replica of the other pool or from this ingress."""

    pool: str
    replica_id: str
    reason: Unlikeness
    parts: tuple[str, ...]

    def __str__(self) -> str:
        if self.reason is Unlikeness.TOKENIZER:
            return f"{self.pool} replica {self.replica_id} has another tokenizer than this ingress and gets no requests"
        other = "decode" if self.pool == "prefill" else "prefill"
        return (
            f"{self.pool} replica {self.replica_id} can exchange KV with no {other} replica: "
            f"unlike {', '.join(self.parts)}"
        )


class SameTokenizer:
    """Lets replicas pass whose tokenizer is the ingress's own. tokenizer: its digest; empty: everybody passes."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer
        self._passes: dict[str, bool] = {}  # by fingerprint: asked twice for each request

    def of(self, table: ReplicaTable) -> ReplicaTable:
        """The table without those that do not pass."""
        if all(self.passes(metadata["peer"]["fingerprint"]) for metadata in table.values()):
            return table
        return {name: of for name, of in table.items() if self.passes(of["peer"]["fingerprint"])}

    def passes(self, fingerprint: str) -> bool:
        known = self._passes.get(fingerprint)
        if known is None:
            known = not self.tokenizer or ModelIdentity.parse(fingerprint).tokenizer == self.tokenizer
            self._passes = {**self._passes, fingerprint: known} if len(self._passes) < 100 else {fingerprint: known}
        return known


def unlike_replicas(pools: Mapping[str, ReplicaTable], same: SameTokenizer) -> Iterator[UnlikeReplica]:
    """pools: by name, those that are deployed. A pool without replicas is nobody's fault here."""
    passing = {
        pool: {name: str(of["peer"]["fingerprint"]) for name, of in same.of(table).items()}
        for pool, table in pools.items()
    }
    for pool, table in pools.items():
        others = {fingerprint for other, of in passing.items() if other != pool for fingerprint in of.values()}
        for name in table:
            if name not in passing[pool]:
                yield UnlikeReplica(pool, name, Unlikeness.TOKENIZER, ("tokenizer",))
            elif others and passing[pool][name] not in others:
                mine = ModelIdentity.parse(passing[pool][name])
                differences = [mine.differences(ModelIdentity.parse(other)) for other in others]
                yield UnlikeReplica(pool, name, Unlikeness.NO_PARTNER, min(differences, key=len))


class UnlikeWatch:
    """Says who is unlike: a log line when it is found and when it is over, and a gauge. On the router's event loop."""

    def __init__(self, same: SameTokenizer, tell: Callable[[str, str, int], None]) -> None:
        """tell: how many there are, by pool and reason."""
        self._same, self._tell = same, tell
        self.found: tuple[UnlikeReplica, ...] = ()

    def look(self, pools: Mapping[str, ReplicaTable]) -> None:
        """The pools are these now."""
        before, self.found = self.found, tuple(unlike_replicas(pools, self._same))
        for replica in self.found:
            if replica not in before:
                logger.warning("%s", replica, extra={"event": "unlike_replica", "replica": replica.replica_id})
        for replica in before:
            if replica not in self.found:
                logger.info("no longer unlike", extra={"event": "unlike_over", "replica": replica.replica_id})
        counts = Counter((replica.pool, replica.reason) for replica in self.found)
        for pool in pools:
            for reason in Unlikeness:
                self._tell(pool, reason, counts[pool, reason])
