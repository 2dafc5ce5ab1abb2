"""What the two halves of the handoff protocol ask for and report. Standard library only, no I/O.

Orders are carried out by the transfer thread; events go on to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from replicas.messages import Dispute, Handoff, TransferNote, TransferPeer


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """lease_s: how long the source holds blocks for a silent reader; the reader renews every third of it.

    resend_s: first interval after which an unanswered message goes again; it doubles up to max_resend_s.
    remember_s: how long outcomes are known, at least; in any case longer than two leases.
    quarantine_s: a read still in flight that long after its transfer ended is counted as quarantined.
    ask_peers_s: how often peers with which nothing is open are asked whether they are still there.
    """

    lease_s: float = 10.0
    resend_s: float = 0.05
    max_resend_s: float = 1.0
    remember_s: float = 120.0
    quarantine_s: float = 5.0
    ask_peers_s: float = 20.0


class SourceOutcome(StrEnum):
    """Why the source let go of a transfer's blocks."""

    CONFIRMED = "confirmed"  # the reader has them
    DROPPED = "dropped"  # the reader does not want them
    EXPIRED = "expired"
    CANCELLED = "cancelled"  # by the source's own engine
    PEER_DEAD = "peer dead"
    PEER_UNREACHABLE = "peer unreachable"  # never offered: the reader's metadata could not be loaded


class LossReason(StrEnum):
    """Why a reader did not get its KV. All but CANCELLED may be retried on another pair."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused by the source"
    DROPPED = "dropped by the source"
    MISMATCH = "handoff mismatch"
    READ_FAILED = "read failed"
    DIGEST_MISMATCH = "digest mismatch"
    PEER_DEAD = "peer dead"
    PEER_UNREACHABLE = "peer unreachable"


# -- orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendNote:
    """Send once. A failure is as good as a loss on the way: the machine resends what matters."""

    agent_name: str
    message: Handoff | TransferNote | Dispute


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read, and carry `note` to the peer as the read's own notification; then call read_ended exactly once.

    note: a DONE with the last read of a transfer, a RENEW with those before it. One of a transfer is open at a time.
    """

    transfer_id: str
    peer: TransferPeer
    local_block_ids: tuple[int, ...]
    remote_block_ids: tuple[int, ...]
    note: TransferNote


@dataclass(frozen=True, slots=True)
class CheckDigests:
    """Digest the local blocks, compare one by one, and call digests_checked. digests: as `block_digests`. first_block:
    which of the prompt's blocks the first of them is."""

    transfer_id: str
    first_block: int
    local_block_ids: tuple[int, ...]
    digests: bytes


# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandoffArrived:
    """Reader: the KV lies ready at the source, or its first part; answer with read_into as soon as there are blocks."""

    transfer_id: str
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class LastPartArrived:
    """Reader: nothing follows any more. Unless what HandoffArrived told of was the last part, too."""

    transfer_id: str
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class KvReady:
    """Reader, final: the blocks given to read_into hold the prompt's KV; those that were read are verified."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class KvLost:
    """Reader, final. Blocks given to read_into stay the transfer's until ReadReleased."""

    transfer_id: str
    reason: LossReason
    detail: str


@dataclass(frozen=True, slots=True)
class ReadReleased:
    """Reader: the transfer has let go of the blocks given to read_into. Once per accepted read_into, or never."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ReaderChecked:
    """Source: whether a handoff to this reader would be sent now. problem: why not; empty if it would."""

    transfer_id: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SourceReleased:
    """Source, final: the transfer has let go of the offered blocks, of all parts. Once per accepted first part."""

    transfer_id: str
    outcome: SourceOutcome


@dataclass(frozen=True, slots=True)
class BlocksDisputed:
    """Source, at any time: what a reader got of these blocks was not what was offered, by its own word.

    Whoever still holds what was in them should not go on using it. They may have been freed since.
    """

    transfer_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommandRefused:
    """The engine asked for something impossible: a bug of the caller. Nothing changed.

    Blocks named in a refused offer or read_into were never exposed to a transfer.
    """

    transfer_id: str
    command: str
    detail: str


Order = SendNote | StartRead | CheckDigests
SourceEvent = ReaderChecked | SourceReleased | BlocksDisputed
ReaderEvent = HandoffArrived | LastPartArrived | KvReady | KvLost | ReadReleased
Event = ReaderEvent | SourceEvent | CommandRefused
Action = Order | Event


class Backoff:
    """When to send an unanswered message again: after first_s, then doubling up to max_s. Mutable."""

    __slots__ = ("_interval_s", "_max_s", "due_s")

    def __init__(self, now_s: float, first_s: float, max_s: float) -> None:
        self._interval_s = first_s
        self._max_s = max_s
        self.due_s = now_s + first_s

    def advance(self, now_s: float) -> None:
        """The message was sent at now_s."""
        self._interval_s = min(2 * self._interval_s, self._max_s)
        self.due_s = now_s + self._interval_s
