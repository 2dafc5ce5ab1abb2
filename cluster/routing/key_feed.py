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


class KeyFeed:
    """Of one pool. What replicas say goes into the router's index; gaps do no harm, as nothing there depends on
    another entry. every_s: how often it wants to be asked who is due."""

    def __init__(self, index: PrefixIndex, pool: str) -> None:
        self._index, self.every_s = index, _ASK_EVERY_S[pool]
        self._asked_s: dict[str, float] = {}

    def due(self, now_s: float, present: Collection[str]) -> list[str]:
        """Those that have not been asked for a while. Mutates: they are taken to be asked now."""
        self._asked_s = {name: self._asked_s[name] for name in present if name in self._asked_s}
        before_s = now_s - max(self.every_s, _SECONDS_A_REPLICA * len(present))
        due = [name for name in present if self._asked_s.get(name, before_s) <= before_s]
        self._asked_s |= dict.fromkeys(due, now_s)
        return due

    def position(self, replica_id: str) -> KeyPosition:
        """From where on it is to be asked."""
        return self._index.told(replica_id)

    def heard(self, replica_id: str, part: KeyPart | None, after: KeyPosition) -> bool:
        """It has answered so; whether there is more. after: from where on it was asked. Mutates.

        Serve takes a replica off the table for a moment when it gives it new options, and the index forgets it: if that
        was meanwhile, it is asked anew, from the beginning.
        """
        if part is None or self._index.fingerprint_of(replica_id) is None:
            return False
        known = self.position(replica_id)
        if known != after:
            return True
        if part.epoch != known.epoch:
            if known.epoch:  # it has started again, with an empty cache
                self._index.forget(replica_id)
            known = KeyPosition(part.epoch, 0)
        elif part.start > known.position:
            extra = {"event": "cached_keys_gap", "replica": replica_id, "num_missed": part.start - known.position}
            logger.info("a replica has cached more than it could tell", extra=extra)
        self._index.holds(replica_id, part.numbers())
        self._index.tell(replica_id, KeyPosition(part.epoch, part.stop))
        return known.position < part.stop < part.end
