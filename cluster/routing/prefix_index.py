"""Which pieces of prompts each replica is believed to have in its prefix cache. Pure; time is an argument.

Believed is what a replica says that it cached or used, what its replies prove, and for a while what this router has
sent there. What a replica evicts it does not say. So each is taken to forget, as it does, what it has not used for
longest, once it can hold no more; and where a reply shows that something is gone, what was used before that is taken to
be gone too. How often such beliefs have held counts in what is expected.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.routing.replica_registry import ReplicaTable
from replicas.messages import KeyPosition
from scheduler.recent_keys import MAX_RECENT_KEYS, PIECE_BLOCKS

# For so long what was sent is believed to be there before anybody says so.
SENT_TTL_S = 120.0
_SMOOTHING = 0.1


@dataclass(slots=True)
class _Replica:
    """held: pieces that it has said or shown to have, with the number of their last use, least recently used first.
    sent: others, with the time until which they are believed, by that time. credit: of what was expected there so much
    was found, lately. told: so far it has said what it has."""

    fingerprint: str
    epoch: str
    max_pieces: int
    held: dict[int, int] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    credit: float = 1.0
    told: KeyPosition = field(default_factory=KeyPosition)


class PrefixIndex:
    """One for each router, of both pools. All methods but those that tell something mutate."""

    def __init__(self, ttl_s: float = SENT_TTL_S) -> None:
        self._ttl_s = ttl_s
        self._replicas: dict[str, _Replica] = {}
        self._holders: dict[int, set[str]] = {}  # of each piece that somebody has
        self._expiries: deque[tuple[float, str, Sequence[int]]] = deque()
        self._fingerprints: Counter[str] = Counter()
        self.num_uses = 0

    # -- who there is ------------------------------------------------------------------------------

    def present(self, tables: Iterable[ReplicaTable]) -> None:
        """These replicas there are now. Of others, and of one that has started again, nothing is believed any more."""
        there = {name: metadata for table in tables for name, metadata in table.items()}
        for name in [name for name in self._replicas if name not in there]:
            self._remove(name)
        for name, metadata in there.items():
            fingerprint, epoch = metadata["peer"]["fingerprint"], metadata["peer"].get("epoch", "")
            known = self._replicas.get(name)
            if known is not None and (known.fingerprint, known.epoch) != (fingerprint, epoch):
                self._remove(name)
                known = None
            if known is None:
                num_blocks = metadata.get("num_prefix_blocks", metadata["num_blocks"])
                max_pieces = min(max(1, num_blocks // PIECE_BLOCKS), MAX_RECENT_KEYS)
                self._replicas[name] = _Replica(fingerprint, epoch, max_pieces)
                self._fingerprints[fingerprint] += 1

    @property
    def fingerprints(self) -> Iterable[str]:
        """Of all that there are: each has keys of its own."""
        return self._fingerprints

    def fingerprint_of(self, replica_id: str) -> str | None:
        """None: there is none of this name."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.fingerprint

    def told(self, replica_id: str) -> KeyPosition:
        """So far it has said what it has: nothing, once what it said is forgotten."""
        replica = self._replicas.get(replica_id)
        return KeyPosition() if replica is None else replica.told

    def tell(self, replica_id: str, up_to: KeyPosition) -> None:
        """All that it has said up to there was taken in."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.told = up_to

    def forget(self, replica_id: str) -> None:
        """Its cache is empty: it has died, or started again."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            for key in (*replica.held, *replica.sent):
                self._drop_holder(replica_id, key)
            replica.held.clear()
            replica.sent.clear()

    # -- what is expected --------------------------------------------------------------------------

    def expected(self, keys: Iterable[int], now_s: float) -> dict[str, int]:
        """How many pieces of a prompt each replica has, from the first on without a gap; of those that have any.

        keys: of the prompt, in order; of an iterator no more is taken than somebody has, and one more.
        """
        self._expire(now_s)
        found: dict[str, int] = {}
        having: set[str] | None = None
        depth = 0
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            still = holders if having is None else having & holders
            if having is not None and len(still) < len(having):
                found.update(dict.fromkeys(having - still, depth))
            having = still
            if not still:
                break
            depth += 1
        if having:
            found.update(dict.fromkeys(having, depth))
        return found

    def credit(self, replica_id: str) -> float:
        """Of what is believed to be there so much is found, as a part of one."""
        replica = self._replicas.get(replica_id)
        return 0.0 if replica is None else replica.credit

    @property
    def num_pieces(self) -> int:
        """Over all replicas."""
        return sum(len(replica.held) + len(replica.sent) for replica in self._replicas.values())

    # -- what is learned ---------------------------------------------------------------------------

    def sent(self, replica_id: str, keys: Sequence[int], now_s: float) -> None:
        """A prompt goes there: it will be in the cache. keys: of all its pieces; not changed any more."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        until_s = now_s + self._ttl_s
        for key in reversed(keys):
            if key not in replica.held:
                replica.sent.pop(key, None)  # to the end
                replica.sent[key] = until_s
                self._holders.setdefault(key, set()).add(replica_id)
        self._expiries.append((until_s, replica_id, keys))
        while len(replica.sent) > replica.max_pieces:
            self._drop(replica_id, replica, next(iter(replica.sent)))

    def unsent(self, replica_id: str, keys: Sequence[int]) -> None:
        """It was not computed there after all, as far as is known."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            for key in keys:
                if key in replica.sent:
                    self._drop(replica_id, replica, key)

    def holds(self, replica_id: str, keys: Sequence[int]) -> None:
        """It has just used or computed these, the last of them first: it says so, or has answered the prompt."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        held, holders = replica.held, self._holders
        for key in keys:
            if held.pop(key, None) is None:
                replica.sent.pop(key, None)
                holders.setdefault(key, set()).add(replica_id)
            self.num_uses += 1
            held[key] = self.num_uses
        while len(held) > replica.max_pieces:
            self._drop(replica_id, replica, next(iter(held)))

    def answered(self, replica_id: str, keys: Sequence[int], num_expected: int, num_found: int, num_uses: int) -> None:
        """Of this prompt it was expected to have so many pieces, and had so many; now it has them all.

        num_uses: as it was when that was expected. What has been used there since proves nothing of what is older.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        num_expected = min(num_expected, len(keys))
        if num_expected:
            replica.credit += _SMOOTHING * (min(num_found, num_expected) / num_expected - replica.credit)
        if num_found < num_expected:
            use = replica.held.get(keys[num_found])
            if use is not None and use <= num_uses:
                self._drop_older(replica_id, replica, use)
        # Leaves are forgotten before what they stand on.
        self.holds(replica_id, keys[::-1])

    # -- what is forgotten -------------------------------------------------------------------------

    def _drop_older(self, replica_id: str, replica: _Replica, use: int) -> None:
        for key, of_key in list(replica.held.items()):
            if of_key > use:
                break
            self._drop(replica_id, replica, key)

    def _expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            until_s, replica_id, keys = self._expiries.popleft()
            replica = self._replicas.get(replica_id)
            if replica is not None:
                for key in keys:
                    if replica.sent.get(key) == until_s:
                        self._drop(replica_id, replica, key)

    def _drop(self, replica_id: str, replica: _Replica, key: int) -> None:
        """It is in one of the two."""
        replica.held.pop(key, None)
        replica.sent.pop(key, None)
        self._drop_holder(replica_id, key)

    def _drop_holder(self, replica_id: str, key: int) -> None:
        holders = self._holders[key]
        holders.discard(replica_id)
        if not holders:
            del self._holders[key]

    def _remove(self, replica_id: str) -> None:
        self.forget(replica_id)
        fingerprint = self._replicas.pop(replica_id).fingerprint
        self._fingerprints[fingerprint] -= 1
        if not self._fingerprints[fingerprint]:
            del self._fingerprints[fingerprint]


def tokens_of(num_pieces: int, prompt_len: int, block_size: int) -> int:
    """Tokens that need not be computed where so many pieces are found: whole blocks, never the last token."""
    return min(num_pieces * PIECE_BLOCKS * block_size, (prompt_len - 1) // block_size * block_size)


def pieces_of(num_tokens: int, block_size: int) -> int:
    """Whole pieces among so many tokens."""
    return num_tokens // (PIECE_BLOCKS * block_size)
