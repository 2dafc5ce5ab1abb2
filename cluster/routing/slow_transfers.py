"""Decode replicas that read a prompt's KV slower than it would be computed again: found, and told of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cluster.routing.replica_registry import ReplicaTable
from replicas.messages import EngineLoad

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_CLEAR = 1.25  # so much faster than needed it must be again, so that one on the brink is not found time and again


@dataclass(frozen=True, slots=True)
class SlowestRead:
    """The replica, of prefill or of decode, from which this decode replica reads slowest, as it says.

    computed_bytes_per_s: KV that computing a prompt makes; 0.0: nobody has computed one yet.
    """

    reader_id: str
    source_id: str
    bytes_per_s: float
    computed_bytes_per_s: float

    @property
    def key(self) -> tuple[str, str]:
        return self.reader_id, self.source_id

    def __str__(self) -> str:
        return (
            f"decode replica {self.reader_id} reads KV from replica {self.source_id} at "
            f"{self.bytes_per_s / 1e9:.3g} GB/s: to compute a prompt again would be faster "
            f"({self.computed_bytes_per_s / 1e9:.3g} GB/s)"
        )


def slowest_reads(
    decodes: ReplicaTable, loads: Mapping[str, EngineLoad], prefills: Iterable[EngineLoad]
) -> Iterator[SlowestRead]:
    """Of each decode replica that has measured one. loads: what the replicas said last; prefills: of prefill."""
    elsewhere = max((load.prefill_tokens_per_s for load in prefills), default=0.0)
    for name, metadata in decodes.items():
        load = loads.get(name)
        if load is not None and load.slowest_source:
            tokens_per_s = load.prefill_tokens_per_s or elsewhere  # where it would be computed again
            computed_bytes_per_s = tokens_per_s * metadata.get("kv_bytes_per_token", 0)
            yield SlowestRead(name, load.slowest_source, load.slowest_read_bytes_per_s, computed_bytes_per_s)


class SlowTransferWatch:
    """Says whose reads are too slow: a log line when it is found and when it is over, and a gauge. On the router's
    event loop. slowest: of all pairs that were measured, whether it is too slow or not."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """tell: how many there are."""
        self._tell = tell
        self._next_look_s = 0.0
        self.found: tuple[SlowestRead, ...] = ()
        self.slowest: SlowestRead | None = None

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look again. Mutates when it is."""
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _LOOK_EVERY_S
        return True

    def look(self, reads: Iterable[SlowestRead]) -> None:
        """These are the slowest now. Mutates."""
        before = {read.key: read for read in self.found}
        reads = list(reads)
        self.slowest = min(reads, key=lambda read: read.bytes_per_s, default=None)
        self.found = tuple(read for read in reads if _is_slow(read, was_slow=read.key in before))
        for read in self.found:
            if before.pop(read.key, None) is None:
                logger.warning("%s", read, extra={"event": "slow_transfer", **_fields(read)})
        now = {read.key: read for read in reads}
        for read in (now.get(key, gone) for key, gone in before.items()):
            logger.info("KV is read fast enough again", extra={"event": "slow_transfer_over", **_fields(read)})
        self._tell(len(self.found))


def _is_slow(read: SlowestRead, was_slow: bool) -> bool:
    return read.bytes_per_s < read.computed_bytes_per_s * (_CLEAR if was_slow else 1.0)


def _fields(read: SlowestRead) -> dict[str, object]:
    return {
        "reader": read.reader_id,
        "source": read.source_id,
        "gb_per_s": round(read.bytes_per_s / 1e9, 3),
        "computed_gb_per_s": round(read.computed_bytes_per_s / 1e9, 3),
    }
