"""How large the reads are by which a pair is measured, and what they tell. Pure.

The first makes the connection, and its time says nothing. Each that follows is larger, as long as it will take no
longer than LONGEST_READ_S if it goes like the one before: to measure 10 MB/s takes no longer than to measure 500 GB/s.

One that is too slow for a larger one to follow is made again, and the shortest counts: where processes wait for a core,
a small read takes 15 ms now and then, and a pair that is taken for so slow is gone around for minutes.
"""

from __future__ import annotations

from replicas.kv.kv_transport import MAX_PROBE_BYTES
from replicas.kv.pair_rate import PairRate

LONGEST_READ_S = 0.05

_FIRST_BYTES = 64 * 1024
_GROWTH = 4
_TRIES = 3  # of a read that is too slow


class Probe:
    """Reads of one pair, one after another. max_bytes: of the largest, at least 1."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = min(max_bytes, MAX_PROBE_BYTES)
        self._is_connected = False
        self._took: list[tuple[int, float]] = []  # one of each size
        self._num_tries = 0  # of the last one
        self.next_bytes: int | None = min(_FIRST_BYTES, self._max_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the largest read that was timed; 0: none was."""
        return self._took[-1][0] if self._took else 0

    def took(self, duration_s: float) -> None:
        """The read of next_bytes has ended. Mutates: next_bytes is None when enough is known."""
        assert self.next_bytes is not None, "nothing was to be read"
        if not self._is_connected:
            self._is_connected = True
            return
        num_bytes, self.next_bytes = self.next_bytes, None
        duration_s = max(duration_s, 1e-6)
        if num_bytes == self.num_bytes:
            duration_s = min(duration_s, self._took.pop()[1])
        else:
            self._num_tries = 0
        self._took.append((num_bytes, duration_s))
        self._num_tries += 1
        larger = min(_GROWTH * num_bytes, self._max_bytes)
        if larger == num_bytes:
            return
        if duration_s * larger / num_bytes <= LONGEST_READ_S:
            self.next_bytes = larger
        elif self._num_tries < _TRIES:
            self.next_bytes = num_bytes

    def rate(self, replica_id: str) -> PairRate | None:
        """What is known by now. A large read's time less a small one's is that of the bytes alone."""
        if not self._took:
            return None
        (small, latency_s), (large, duration_s) = self._took[0], self._took[-1]
        if duration_s >= 2 * latency_s:
            return PairRate(replica_id, (large - small) / (duration_s - latency_s), latency_s)
        return PairRate(replica_id, large / duration_s, latency_s)
