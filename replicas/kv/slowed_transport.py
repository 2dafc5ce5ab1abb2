"""A transport made slow, for tests and measurements: a read is posted only when its bytes would have come.

So its end, and the source's word of it, come late too, and whoever asks in between is told that it is under way.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from replicas.kv.kv_transport import (
    KvTransport,
    ReadHandle,
    ReadState,
    TransportError,
    check_probe,
    check_read,
)
from replicas.kv.slow_link import SlowLink
from replicas.messages import TransferPeer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Read:
    """real: the read itself, once it is posted. state: of one that could not be."""

    post: Callable[[], ReadHandle]
    due_s: float
    real: ReadHandle | None = None
    state: ReadState = ReadState.READING


class SlowedTransport(KvTransport):
    """Reads from each peer go one after another, at bytes_per_s() as of when they are started; None: as they are."""

    def __init__(
        self,
        transport: KvTransport,
        bytes_per_s: Callable[[], float | None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._bytes_per_s, self._now_s = transport, bytes_per_s, now_s
        self._links: defaultdict[str, SlowLink] = defaultdict(SlowLink)
        self._reads: dict[int, _Read] = {}
        self._read_ids = count()
        self._told_bytes_per_s: float | None = None

    def local_peer(self) -> TransferPeer:
        return self._transport.local_peer()

    def load_peer(self, peer: TransferPeer) -> None:
        self._transport.load_peer(peer)

    def remove_peer(self, agent_name: str) -> None:
        self._links.pop(agent_name, None)
        self._transport.remove_peer(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        self._transport.notify(agent_name, payload)

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        return self._transport.poll_notifications()

    def start_read(
        self,
        peer: TransferPeer,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes,
    ) -> ReadHandle:
        local = self.local_peer()
        check_read(local, peer, local_block_ids, remote_block_ids)
        num_bytes = len(local_block_ids) * local.block_bytes
        return self._start(
            peer,
            num_bytes,
            lambda: self._transport.start_read(peer, local_block_ids, remote_block_ids, notification),
        )

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        check_probe(self.local_peer(), peer, num_bytes)
        return self._start(peer, num_bytes, lambda: self._transport.start_probe(peer, num_bytes))

    def poll_read(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle.read_id]
        if read.real is None and read.state is ReadState.READING and self._now_s() >= read.due_s:
            try:
                read.real = read.post()
            except TransportError:
                read.state = ReadState.FAILED
        return read.state if read.real is None else self._transport.poll_read(read.real)

    def release_read(self, handle: ReadHandle) -> None:
        read = self._reads[handle.read_id]
        if read.real is not None:
            self._transport.release_read(read.real)
        elif read.state is ReadState.READING:
            raise ValueError("this read has not been posted yet")
        del self._reads[handle.read_id]

    def close(self) -> None:
        self._transport.close()

    def _start(self, peer: TransferPeer, num_bytes: int, post: Callable[[], ReadHandle]) -> ReadHandle:
        """What is not slowed is posted at once, and raises at once."""
        now_s, bytes_per_s = self._now_s(), self._bytes_per_s()
        if bytes_per_s != self._told_bytes_per_s:
            self._told_bytes_per_s = bytes_per_s
            extra = {"event": "reads_slowed", "bytes_per_s": bytes_per_s}
            logger.warning(
                "reads of KV are slowed by injection" if bytes_per_s else "reads of KV are slowed no more", extra=extra
            )
        read = _Read(post, now_s)
        if bytes_per_s is None:
            read.real = post()
        else:
            read.due_s = self._links[peer.agent_name].ends_s(num_bytes, bytes_per_s, now_s)
        handle = ReadHandle(peer.agent_name, next(self._read_ids))
        self._reads[handle.read_id] = read
        return handle
