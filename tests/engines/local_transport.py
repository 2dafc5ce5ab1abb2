"""A second transport, between pools of one process: a read is a copy between two tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count

import torch

from replicas.kv.kv_transport import KvTransport, PeerUnreachable, ReadHandle, ReadState, check_probe, check_read
from replicas.messages import TransferPeer
from replicas.settings import TransferSettings


class LocalHub:
    """The transports of this process, by agent name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.agents: dict[str, LocalTransport] = {}

    def find(self, peer: str, loaded: set[str]) -> LocalTransport:
        with self.lock:
            if peer not in loaded or peer not in self.agents:
                raise PeerUnreachable(f"{peer} is not loaded, or has gone")
            return self.agents[peer]

    def open(
        self, pool: torch.Tensor, replica_id: str, epoch: str, fingerprint: str, settings: TransferSettings
    ) -> LocalTransport:
        """As `replicas.kv.transport_opener.TransportOpener`."""
        return LocalTransport(self, pool, replica_id, epoch, fingerprint)


class LocalTransport(KvTransport):
    """num_reads, num_probes: until now."""

    def __init__(self, hub: LocalHub, pool: torch.Tensor, replica_id: str, epoch: str, fingerprint: str) -> None:
        self.pool, self.mail = pool, list[tuple[str, bytes]]()
        self.num_reads = self.num_probes = 0
        self._hub, self._loaded, self._ids = hub, set[str](), count()
        name, size = f"{replica_id}-{epoch}", pool[0].numel() * pool.element_size()
        self._local = TransferPeer(replica_id, epoch, name, b"local", fingerprint, pool.shape[0], size)
        with hub.lock:
            hub.agents[name] = self

    def local_peer(self) -> TransferPeer:
        return self._local

    def load_peer(self, peer: TransferPeer) -> None:
        if peer.address != b"local":
            raise PeerUnreachable(f"the address of {peer.agent_name} is of another transport")
        self._hub.find(peer.agent_name, {peer.agent_name})
        self._loaded.add(peer.agent_name)

    def remove_peer(self, agent_name: str) -> None:
        self._loaded.discard(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        self._hub.find(agent_name, self._loaded).mail.append((self._local.agent_name, payload))

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        mail, self.mail = self.mail, []
        return mail

    def start_read(
        self, peer: TransferPeer, local_block_ids: Sequence[int], remote_block_ids: Sequence[int], notification: bytes
    ) -> ReadHandle:
        check_read(self._local, peer, local_block_ids, remote_block_ids)
        source = self._hub.find(peer.agent_name, self._loaded)
        self.pool[list(local_block_ids)] = source.pool[list(remote_block_ids)]
        source.mail.append((self._local.agent_name, notification))
        self.num_reads += 1
        return ReadHandle(peer.agent_name, next(self._ids))

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        check_probe(self._local, peer, num_bytes)
        self._hub.find(peer.agent_name, self._loaded)
        self.num_probes += 1
        return ReadHandle(peer.agent_name, next(self._ids))

    def poll_read(self, handle: ReadHandle) -> ReadState:
        return ReadState.DONE

    def release_read(self, handle: ReadHandle) -> None:
        pass

    def close(self) -> None:
        with self._hub.lock:
            self._hub.agents.pop(self._local.agent_name, None)
