"""How one engine reads KV blocks out of another engine's pool. An interface: no NIXL, no torch, no policy here.

A new transport is a new file beside this and a line in `transport_table`.

A transport belongs to one thread: every call is made by the thread that created it.

    TransportError
    |- PeerUnreachable   the peer is dead, unknown or not loaded; nothing was sent
    `- InvalidRead       block ids or pool layouts do not fit; nothing was posted
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from replicas.messages import TransferPeer

MAX_PROBE_BYTES = 32 * 1024**2


class TransportError(Exception):
    """Something outside this process went wrong; never a bug here."""


class PeerUnreachable(TransportError):
    pass


class InvalidRead(TransportError):
    pass


class ReadState(Enum):
    READING = "reading"  # bytes may still land in the local blocks
    DONE = "done"  # every byte is there and the notification is on its way
    FAILED = "failed"  # ended without success: nothing more will land, and what landed is void
    UNKNOWN = "unknown"  # failed, but bytes may still land, and nobody can tell until when


@dataclass(frozen=True, slots=True)
class ReadHandle:
    """Names one read of one transport. Opaque to everybody else."""

    agent_name: str
    read_id: int


class BlockRun(NamedTuple):
    """Blocks adjacent in both pools: one descriptor."""

    local_start: int
    remote_start: int
    num_blocks: int


class KvTransport(ABC):
    """One end of KV transfers. Nothing here blocks for longer than it takes to post."""

    @abstractmethod
    def local_peer(self) -> TransferPeer:
        """What another engine needs to reach this one."""

    @abstractmethod
    def load_peer(self, peer: TransferPeer) -> None:
        """Make a peer reachable. Idempotent: an agent name, and so an epoch, is loaded once.

        Raises PeerUnreachable when its metadata is unusable.
        """

    @abstractmethod
    def remove_peer(self, agent_name: str) -> None:
        """Forget a dead peer; unknown names are ignored. From now on posting to it raises PeerUnreachable.

        Reads in flight from it keep their handles and stay what they are: forgetting does not end a read.
        """

    @abstractmethod
    def notify(self, agent_name: str, payload: bytes) -> None:
        """Send a notification. Raises PeerUnreachable. Returning is no proof of arrival, which may need more polls
        of this end, too."""

    @abstractmethod
    def poll_notifications(self) -> list[tuple[str, bytes]]:
        """(sender's agent name, payload) of all that came since the last poll, in order per sender."""

    @abstractmethod
    def start_read(
        self,
        peer: TransferPeer,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes,
    ) -> ReadHandle:
        """Start to copy remote blocks over local ones, pairwise; `notification` follows to the peer at the end.

        Mutates the local blocks from now on until poll_read says DONE or FAILED; for good if it says UNKNOWN. Raises
        PeerUnreachable or InvalidRead, and then no byte lands.
        """

    @abstractmethod
    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        """Start to read the first bytes of a peer's pool into memory of the transport's own, which nobody looks at.

        Else as start_read: whatever the bytes are, without a notification, and its handle is like any other.
        """

    @abstractmethod
    def poll_read(self, handle: ReadHandle) -> ReadState:
        """Where a read stands; makes it progress. Never raises. All but READING are final."""

    @abstractmethod
    def release_read(self, handle: ReadHandle) -> None:
        """Forget a read that is DONE or FAILED. Raises ValueError for any other: nothing can recall a read."""

    @abstractmethod
    def close(self) -> None:
        """Release every resource. Only when no read is in flight, or UNKNOWN. Idempotent."""


def check_probe(local: TransferPeer, remote: TransferPeer, num_bytes: int) -> None:
    """Raises InvalidRead for more bytes than a probe may have, or either pool has."""
    most = min(MAX_PROBE_BYTES, *(peer.num_blocks * peer.block_bytes for peer in (local, remote)))
    if not 0 < num_bytes <= most:
        raise InvalidRead(f"a probe of {num_bytes} bytes; at most {most}")


def merge_runs(local_block_ids: Sequence[int], remote_block_ids: Sequence[int]) -> list[BlockRun]:
    """Pairs of blocks as runs that ascend by one on both sides, in the given order."""
    runs: list[BlockRun] = []
    for local, remote in zip(local_block_ids, remote_block_ids, strict=True):
        if runs:
            start, remote_start, length = runs[-1]
            if local == start + length and remote == remote_start + length:
                runs[-1] = BlockRun(start, remote_start, length + 1)
                continue
        runs.append(BlockRun(local, remote, 1))
    return runs


def check_read(
    local: TransferPeer, remote: TransferPeer, local_block_ids: Sequence[int], remote_block_ids: Sequence[int]
) -> None:
    """Raises InvalidRead unless every pair of ids lies in both pools and the pools' blocks are alike."""
    if local.block_bytes != remote.block_bytes:
        raise InvalidRead(f"a local block has {local.block_bytes} bytes, a remote one {remote.block_bytes}")
    if not local_block_ids or len(local_block_ids) != len(remote_block_ids):
        raise InvalidRead(f"{len(local_block_ids)} local blocks for {len(remote_block_ids)} remote ones")
    for side, ids, num_blocks in (
        ("local", local_block_ids, local.num_blocks),
        ("remote", remote_block_ids, remote.num_blocks),
    ):
        if min(ids) < 0 or max(ids) >= num_blocks:
            raise InvalidRead(f"a {side} block id lies outside 0..{num_blocks - 1}")
    if len(set(local_block_ids)) != len(local_block_ids):
        raise InvalidRead("a local block is named twice")
