"""A KV transport between pools of one process, whose network does what a test or a simulation tells it.

Nothing moves by itself: a notification arrives at the first poll after its delay, a read copies its bytes at the
first poll after its delay (so a source that frees its blocks too early is seen). Same faults and same polls at
the same times give the same outcome.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from replicas.kv.kv_transport import (
    KvTransport,
    PeerUnreachable,
    ReadHandle,
    ReadState,
    check_probe,
    check_read,
    merge_runs,
)
from replicas.kv.slow_link import SlowLink
from replicas.messages import TransferPeer


@dataclass(frozen=True, slots=True)
class ReadFate:
    """delay_s: math.inf never ends. The bytes land at the end, whether the read succeeds or not.

    is_known: else the transport says at once that it failed, and cannot tell when it will have ended.
    """

    delay_s: float = 0.0
    succeeds: bool = True
    is_known: bool = True


class NetworkFaults:
    """A faultless network. Subclass and override."""

    def notification_delays_s(self, sender: str, receiver: str, payload: bytes) -> Sequence[float]:
        """One delay per copy that arrives: () loses it, (0.0, 0.0) duplicates it. May raise PeerUnreachable."""
        return (0.0,)

    def read_fate(self, reader: str, source: str) -> ReadFate:
        """May raise PeerUnreachable."""
        return ReadFate()

    def probe_fate(self, reader: str, source: str) -> ReadFate:
        """Likewise, of a read that only measures."""
        return ReadFate()

    def bytes_per_s(self, reader: str, source: str) -> float:
        """How fast this pair's reads are, one after another; a fate's delay comes on top."""
        return math.inf


@dataclass(slots=True)
class _Read:
    peer: TransferPeer
    local_block_ids: tuple[int, ...]
    remote_block_ids: tuple[int, ...]
    notification: bytes | None
    ends_s: float
    fate: ReadFate
    state: ReadState = ReadState.READING


class FakeNetwork:
    """Connects the FakeTransports that are given it. Safe to share between threads."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, faults: NetworkFaults | None = None) -> None:
        self.now_s = now_s
        self.faults = faults if faults is not None else NetworkFaults()
        self.lock = threading.RLock()
        self._agents: dict[str, FakeTransport] = {}
        self._mail: dict[str, list[tuple[float, int, str, bytes]]] = {}
        self._order = count()
        self._links: defaultdict[tuple[str, str], SlowLink] = defaultdict(SlowLink)

    def join(self, transport: FakeTransport) -> None:
        name = transport.local_peer().agent_name
        with self.lock:
            if name in self._agents:
                raise ValueError(f"agent {name} exists already")
            self._agents[name] = transport
            self._mail[name] = []

    def kill(self, agent_name: str) -> None:
        """The agent is gone: posting to it raises, reads from it fail at their next poll. Idempotent."""
        with self.lock:
            self._agents.pop(agent_name, None)
            self._mail.pop(agent_name, None)

    def find(self, agent_name: str) -> FakeTransport:
        """Raises PeerUnreachable when the agent is dead or never was."""
        with self.lock:
            if agent_name not in self._agents:
                raise PeerUnreachable(f"{agent_name} is dead")
            return self._agents[agent_name]

    def post(self, sender: str, receiver: str, payload: bytes) -> None:
        """Raises PeerUnreachable."""
        with self.lock:
            self.find(receiver)
            for delay_s in self.faults.notification_delays_s(sender, receiver, payload):
                mail = (self.now_s() + delay_s, next(self._order), sender, payload)
                heapq.heappush(self._mail[receiver], mail)

    def read_ends_s(self, reader: str, source: str, num_bytes: int, delay_s: float) -> float:
        """When a read that is posted now will have ended."""
        with self.lock:
            bytes_per_s = self.faults.bytes_per_s(reader, source)
            return self._links[reader, source].ends_s(num_bytes, bytes_per_s, self.now_s()) + delay_s

    def collect(self, receiver: str) -> list[tuple[str, bytes]]:
        """What is due for a receiver, by time of arrival; removes it. Nothing for a dead one."""
        with self.lock:
            mail = self._mail.get(receiver, [])
            due: list[tuple[str, bytes]] = []
            while mail and mail[0][0] <= self.now_s():
                due.append(heapq.heappop(mail)[2:])
            return due


class FakeTransport(KvTransport):
    """pool: num_blocks * block_bytes bytes; its owner may look into it and write it at any time."""

    def __init__(
        self,
        network: FakeNetwork,
        pool: bytearray,
        block_bytes: int,
        replica_id: str,
        epoch: str,
        fingerprint: str = "fake",
    ) -> None:
        self.pool = pool
        self._network = network
        self._local = TransferPeer(
            replica_id=replica_id,
            epoch=epoch,
            agent_name=f"{replica_id}-{epoch}",
            address=b"fake",
            fingerprint=fingerprint,
            num_blocks=len(pool) // block_bytes,
            block_bytes=block_bytes,
        )
        self._peers: dict[str, TransferPeer] = {}
        self._reads: dict[int, _Read] = {}
        self._read_ids = count()
        network.join(self)

    def local_peer(self) -> TransferPeer:
        return self._local

    def load_peer(self, peer: TransferPeer) -> None:
        if peer.agent_name not in self._peers:
            self._network.find(peer.agent_name)
            self._peers[peer.agent_name] = peer

    def remove_peer(self, agent_name: str) -> None:
        self._peers.pop(agent_name, None)

    def notify(self, agent_name: str, payload: bytes) -> None:
        self._check_loaded(agent_name)
        self._network.post(self._local.agent_name, agent_name, payload)

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        return self._network.collect(self._local.agent_name)

    def start_read(
        self,
        peer: TransferPeer,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes,
    ) -> ReadHandle:
        check_read(self._local, peer, local_block_ids, remote_block_ids)
        self._check_alive(peer)
        fate = self._network.faults.read_fate(self._local.agent_name, peer.agent_name)
        num_bytes = len(local_block_ids) * self._local.block_bytes
        ends_s = self._network.read_ends_s(self._local.agent_name, peer.agent_name, num_bytes, fate.delay_s)
        return self._add(_Read(peer, tuple(local_block_ids), tuple(remote_block_ids), notification, ends_s, fate))

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        check_probe(self._local, peer, num_bytes)
        self._check_alive(peer)
        fate = self._network.faults.probe_fate(self._local.agent_name, peer.agent_name)
        ends_s = self._network.read_ends_s(self._local.agent_name, peer.agent_name, num_bytes, fate.delay_s)
        return self._add(_Read(peer, (), (), None, ends_s, fate))

    def poll_read(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle.read_id]
        if read.state is ReadState.READING:
            read.state = self._progress(read)
        return read.state if read.fate.is_known else ReadState.UNKNOWN

    def release_read(self, handle: ReadHandle) -> None:
        if self.poll_read(handle) in (ReadState.READING, ReadState.UNKNOWN):
            raise ValueError("this read is still in flight")
        del self._reads[handle.read_id]

    def close(self) -> None:
        self._network.kill(self._local.agent_name)

    def _add(self, read: _Read) -> ReadHandle:
        handle = ReadHandle(read.peer.agent_name, next(self._read_ids))
        self._reads[handle.read_id] = read
        return handle

    def _check_alive(self, peer: TransferPeer) -> None:
        self._check_loaded(peer.agent_name)
        self._network.find(peer.agent_name)

    def _check_loaded(self, agent_name: str) -> None:
        if agent_name not in self._peers:
            raise PeerUnreachable(f"{agent_name} is not loaded")

    def _progress(self, read: _Read) -> ReadState:
        network = self._network
        with network.lock:
            try:
                source = network.find(read.peer.agent_name)
                if network.now_s() < read.ends_s:
                    return ReadState.READING
                self._copy_from(source, read)
                if not read.fate.succeeds:
                    return ReadState.FAILED
                if read.notification is not None:
                    network.post(self._local.agent_name, read.peer.agent_name, read.notification)
                return ReadState.DONE
            except PeerUnreachable:
                return ReadState.FAILED

    def _copy_from(self, source: FakeTransport, read: _Read) -> None:
        size = self._local.block_bytes
        for local, remote, num_blocks in merge_runs(read.local_block_ids, read.remote_block_ids):
            piece = source.pool[remote * size : (remote + num_blocks) * size]
            self.pool[local * size : (local + num_blocks) * size] = piece
