"""The KV transport over NIXL's UCX backend: RDMA between machines, shared memory or TCP between CPUs, CUDA IPC.

What of a card UCX has opened it never closes. So pools on this machine's cards are opened and read here (`near_pools`),
and of such a peer NIXL is told how to connect, not what memory there is: notifications go by it in any case.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replicas.kv.cuda_ipc import Copying, NoCudaIpc
from replicas.kv.kv_transport import (
    MAX_PROBE_BYTES,
    BlockRun,
    KvTransport,
    PeerUnreachable,
    ReadHandle,
    ReadState,
    check_probe,
    check_read,
    merge_runs,
)
from replicas.kv.near_pools import near_pools
from replicas.kv.nixl_address import NixlAddress, NotAnAddress
from replicas.kv.nixl_agent import MemoryType, NixlAgent, Region, unknown
from replicas.kv.ucx_environment import set_ucx_defaults, ucx_settings
from replicas.messages import TransferPeer
from replicas.settings import TransferSettings

_ENDED = (ReadState.DONE, ReadState.FAILED)

logger = logging.getLogger(__name__)


def open_ucx(
    pool: torch.Tensor, replica_id: str, epoch: str, fingerprint: str, settings: TransferSettings
) -> NixlTransport:
    """As `transport_opener.TransportOpener`."""
    return NixlTransport(pool, replica_id, epoch, fingerprint, settings.net_devices)


@dataclass(slots=True)
class _Read:
    """nixl_handle: None of one that is near; notice: what then follows at its end."""

    agent_name: str
    nixl_handle: Any
    state: ReadState
    num_descriptors: int
    near: Copying | None = None
    notice: bytes = b""


class NixlTransport(KvTransport):
    """Reads into one contiguous pool tensor, dimension 0 of which counts the blocks. Registers it once.

    Creating it loads UCX and registers the memory (about half a second on a CPU); the pool must outlive it.
    net_devices: as `ucx_environment.set_ucx_defaults`, which changes the environment of the process.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        replica_id: str,
        epoch: str,
        fingerprint: str,
        net_devices: str | None = None,
    ) -> None:
        if not pool.is_contiguous() or pool.dim() < 2:
            raise ValueError("the pool must be one contiguous tensor of blocks")
        self._pool = pool  # keeps the registered memory alive
        name = f"{replica_id}-{epoch}"
        on_cpu = pool.device.type == "cpu"
        set_ucx_defaults(os.environ, pool.device.type, net_devices)
        mem_type: MemoryType = "DRAM" if on_cpu else "VRAM"
        self._agent = NixlAgent(name, mem_type)
        self._near = near_pools(pool)
        self._agent.register(pool)
        # The metadata tell of what has been registered until now.
        self._address = NixlAddress(
            self._agent.metadata(), pool.data_ptr(), 0 if on_cpu else pool.get_device(), mem_type,
            self._near.address if self._near else b"", self._agent.connection() if self._near else b"",
        )  # fmt: skip
        self._scratch = torch.empty(min(MAX_PROBE_BYTES, pool.nbytes), dtype=torch.uint8, device=pool.device)
        if not on_cpu:
            torch.cuda.synchronize(pool.device)  # what used that memory before: a read waits for no stream
        self._agent.register(self._scratch)
        self._local = TransferPeer(
            replica_id=replica_id,
            epoch=epoch,
            agent_name=name,
            address=self._address.encode(),
            fingerprint=fingerprint,
            num_blocks=pool.shape[0],
            block_bytes=pool[0].numel() * pool.element_size(),
        )
        self._peers: dict[str, tuple[TransferPeer, NixlAddress]] = {}
        self._unopened: set[str] = set()  # peers on this machine of whose memory neither we nor NIXL know yet
        self._removed: set[str] = set()  # peers still loaded in NIXL because of a read in flight
        self._reads: dict[int, _Read] = {}
        self._num_reads = 0
        self._closed = False
        blocks = f"{mem_type} pool, {pool.shape[0]} blocks of {self._local.block_bytes} bytes"
        logger.info("NIXL agent %s: %s, %s", name, blocks, ucx_settings(os.environ))

    def local_peer(self) -> TransferPeer:
        return self._local

    def load_peer(self, peer: TransferPeer) -> None:
        if peer.agent_name in self._peers:
            return
        if peer.agent_name in self._removed:
            raise PeerUnreachable(f"{peer.agent_name} was removed")
        try:
            address = NixlAddress.decode(peer.address)
        except NotAnAddress as error:
            raise PeerUnreachable(f"the address of {peer.agent_name} is none of NIXL's: {error}") from error
        is_near = self._near is not None and self._near.may_open(address.near)
        loaded = self._agent.load(peer.agent_name, address.connection if is_near else address.agent_metadata)
        if loaded != peer.agent_name:
            if loaded not in self._peers and loaded not in self._removed:
                self._agent.unload(loaded)
            raise PeerUnreachable(f"metadata of {peer.agent_name} belongs to {loaded}")
        self._peers[peer.agent_name] = peer, address
        if is_near:
            self._unopened.add(peer.agent_name)
        kind = "on this machine" if is_near else address.mem_type
        logger.info("NIXL agent %s: loaded peer %s (%s)", self._local.agent_name, peer.agent_name, kind)

    def remove_peer(self, agent_name: str) -> None:
        if self._peers.pop(agent_name, None) is not None:
            self._removed.add(agent_name)
            self._unload_if_idle(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        if agent_name not in self._peers:
            raise PeerUnreachable(f"{agent_name} is not loaded")
        self._agent.notify(agent_name, payload)

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        return self._agent.notifications()

    def start_read(
        self,
        peer: TransferPeer,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes,
    ) -> ReadHandle:
        check_read(self._local, peer, local_block_ids, remote_block_ids)
        address = self._loaded(peer)
        runs = merge_runs(local_block_ids, remote_block_ids)
        local = self._regions(self._address, [run.local_start for run in runs], runs)
        return self._start(peer, local, self._regions(address, [run.remote_start for run in runs], runs), notification)

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        check_probe(self._local, peer, num_bytes)
        address = self._loaded(peer)
        here = [(self._scratch.data_ptr(), num_bytes, self._address.device_id)]
        return self._start(peer, here, [(address.base_address, num_bytes, address.device_id)], b"")

    def _start(self, peer: TransferPeer, local: list[Region], remote: list[Region], notice: bytes) -> ReadHandle:
        address, name = self._loaded(peer), peer.agent_name
        if self._is_near(name, address):
            read = self._read_near(name, address.base_address, local, remote, notice)
        else:
            read = _Read(name, *self._agent.read(name, local, remote, address.mem_type, notice), len(local))
        handle = ReadHandle(name, self._num_reads)
        self._num_reads += 1
        self._reads[handle.read_id] = read
        return handle

    def _is_near(self, agent_name: str, address: NixlAddress) -> bool:
        """Whether its pool is open here: from the first read on, if it can be. If not, NIXL is told of it. Raises
        PeerUnreachable. Mutates."""
        if self._near is None:
            return False
        if agent_name in self._unopened:
            if not self._near.open(agent_name, address.near):
                self._agent.load(agent_name, address.agent_metadata)
            self._unopened.discard(agent_name)
        return agent_name in self._near

    def _read_near(
        self, agent_name: str, begin: int, local: list[Region], remote: list[Region], notice: bytes
    ) -> _Read:
        """begin: of its pool, where it lives."""
        assert self._near is not None
        pieces = [(to, origin - begin, size) for (to, size, _), (origin, _, _) in zip(local, remote, strict=True)]
        try:
            copying, state = self._near.read(agent_name, pieces), ReadState.READING
        except NoCudaIpc as error:
            copying, state = None, unknown(agent_name, error)
        return _Read(agent_name, None, state, len(local), copying, notice)

    def poll_read(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle.read_id]
        if read.state is ReadState.READING and read.near is None:
            read.state = self._agent.state(read.agent_name, read.nixl_handle)
        elif read.state is ReadState.READING:
            read.state = self._state_near(read)
        return read.state

    def _state_near(self, read: _Read) -> ReadState:
        assert read.near is not None
        try:
            if not read.near.is_over():
                return ReadState.READING
            if read.notice:
                self._agent.notify(read.agent_name, read.notice)
        except NoCudaIpc as error:
            return unknown(read.agent_name, error)
        except PeerUnreachable as error:
            logger.warning("a read from %s is void: %s", read.agent_name, error)
            return ReadState.FAILED
        return ReadState.DONE

    def release_read(self, handle: ReadHandle) -> None:
        read = self._reads[handle.read_id]
        if read.state not in _ENDED:
            raise ValueError("this read is still in flight")
        del self._reads[handle.read_id]
        self._release(read)
        self._unload_if_idle(read.agent_name)

    def num_descriptors(self, handle: ReadHandle) -> int:
        """Into how many pieces the read's blocks were merged."""
        return self._reads[handle.read_id].num_descriptors

    def close(self) -> None:
        if self._closed:
            return
        if any(read.state not in _ENDED for read in self._reads.values()):
            raise ValueError("a read is still in flight")
        self._closed = True
        for read in self._reads.values():
            self._release(read)
        self._reads.clear()
        for agent_name in [*self._peers, *self._removed]:
            self._unload(agent_name)
        self._agent.close()

    def _loaded(self, peer: TransferPeer) -> NixlAddress:
        """Raises PeerUnreachable unless it is loaded."""
        loaded, address = self._peers.get(peer.agent_name, (None, self._address))
        if loaded != peer:
            raise PeerUnreachable(f"{peer.agent_name} is not loaded")
        return address

    def _regions(self, at: NixlAddress, starts: list[int], runs: list[BlockRun]) -> list[Region]:
        size = self._local.block_bytes  # the peer's are as large: `check_read`
        return [
            (at.base_address + start * size, run.num_blocks * size, at.device_id)
            for start, run in zip(starts, runs, strict=True)
        ]

    def _release(self, read: _Read) -> None:
        if read.nixl_handle is not None:
            self._agent.release(read.nixl_handle)

    def _unload_if_idle(self, agent_name: str) -> None:
        if agent_name in self._removed and all(read.agent_name != agent_name for read in self._reads.values()):
            self._removed.discard(agent_name)
            self._unload(agent_name)

    def _unload(self, agent_name: str) -> None:
        self._unopened.discard(agent_name)
        if self._near is not None:
            self._near.forget(agent_name)
        self._agent.unload(agent_name)
