"""Who of one pool is to be asked what it has cached, and from where on. Pure; time is an argument."""

from __future__ import annotations

import logging
from collections.abc import Collection

from cluster.routing.prefix_index import PrefixIndex
from replicas.messages import KeyPart, KeyPosition
from replicas.recent_part import KEYS_IN_PART
from scheduler.recent_keys import MAX_RECENT_KEYS

logger = logging.getLogger(__name__)

# Of keys a second is soon enough. With them comes the load, and prefill tells that with its answers only: where several
# routers know it from a second ago, all choose the same replica (benchmarks/RESULTS.md, routing to prefix caches).
_ASK_EVERY_S = {"decode": 1.0, "prefill": 0.2}
# Of a large pool so often that all pulses together take some hundredth of a router's time: 0.3 ms each.
_SECONDS_A_REPLICA = 0.03

# One after another, as many as a whole log has, and what it takes in meanwhile.
MAX_PARTS = MAX_RECENT_KEYS // KEYS_IN_PART + 4

_NOTHING = KeyPosition()


class KeyFeed:
    """Of one pool. What replicas say goes into the router's index; gaps do no harm, as nothing there depends on
    another entry. every_s: how often it wants to be asked who is due."""

    def __init__(self, index: PrefixIndex, pool: str) -> None:
        self._index, self.every_s = index, _ASK_EVERY_S[pool]
        self._known: dict[str, KeyPosition] = {}
        self._asked_s: dict[str, float] = {}

    def due(self, now_s: float, present: Collection[str]) -> list[str]:
        """Those that have not been asked for a while. Mutates: they are taken to be asked now."""
        self._asked_s = {name: self._asked_s[name] for name in present if name in self._asked_s}
        self._known = {name: self._known[name] for name in present if name in self._known}
        before_s = now_s - max(self.every_s, _SECONDS_A_REPLICA * len(present))
        due = [name for name in present if self._asked_s.get(name, before_s) <= before_s]
        self._asked_s |= dict.fromkeys(due, now_s)
        return due

    def position(self, replica_id: str) -> KeyPosition:
        """From where on it is to be asked."""
        return self._known.get(replica_id, _NOTHING)

    def heard(self, replica_id: str, part: KeyPart | None) -> bool:
        """It has answered so; whether there is more. Mutates."""
        if part is None:
            return False
        known = self.position(replica_id)
        if part.epoch != known.epoch:
            if known.epoch:  # it has started again, with an empty cache
                self._index.forget(replica_id)
            known = KeyPosition(part.epoch, 0)
        elif part.start > known.position:
            extra = {"event": "cached_keys_gap", "replica": replica_id, "num_missed": part.start - known.position}
            logger.info("a replica has cached more than it could tell", extra=extra)
        self._index.holds(replica_id, part.numbers())
        self._known[replica_id] = KeyPosition(part.epoch, part.stop)
        return known.position < part.stop < part.end
