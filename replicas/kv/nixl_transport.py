"""The KV transport over NIXL's UCX backend: cuda_ipc or RDMA between GPUs, shared memory or TCP between CPUs.

What NIXL 1.5.1 does, seen or read in its source, and what follows from it here:
- Its progress thread burns a whole core (measured), so there is none: UCX progresses when we poll. So a first
  message goes out only while its sender keeps polling, and emulated reads (shared memory, TCP) need the source's polls.
- Releasing a handle that is in flight says OK and recalls nothing, and so does removing its peer: the handle then
  reports NOT_FOUND while bytes may still land. So neither is done before the read's end, and NOT_FOUND is no end.
- A dead peer: the first message may be lost without an error, later ones raise; handles in flight fail on their own,
  all with REMOTE_DISCONNECT.
- Of a read's descriptors it keeps the last one's request, and a flush of the connection behind them all
  (ucx_backend.cpp, sendXferRange). DONE is the flush's. REMOTE_DISCONNECT ends them all: UCX completes what was posted
  on a broken connection only when its lanes are torn down (ucp_ep.c, ucp_ep_discard_lanes). Any other error is that of
  one part: the others go on, forgotten by NIXL, which stores the error and tells it from then on.
- Importing it closes every log handler of the process, which is not to happen (`kept_logging`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from replicas.kept_logging import kept_logging
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
from replicas.kv.nixl_address import NixlAddress, NotAnAddress
from replicas.kv.ucx_environment import set_ucx_defaults, ucx_settings
from replicas.messages import TransferPeer
from replicas.settings import TransferSettings

with kept_logging():
    from nixl_cu13._api import nixl_agent, nixl_agent_config
    from nixl_cu13._bindings import nixlRemoteDisconnectError

_BACKEND = "UCX"
_STATES = {"PROC": ReadState.READING, "DONE": ReadState.DONE}
_ENDED = (ReadState.DONE, ReadState.FAILED)

_Region = tuple[int, int, int]  # address, bytes, device

logger = logging.getLogger(__name__)


def open_ucx(
    pool: torch.Tensor, replica_id: str, epoch: str, fingerprint: str, settings: TransferSettings
) -> NixlTransport:
    """As `transport_opener.TransportOpener`."""
    return NixlTransport(pool, replica_id, epoch, fingerprint, settings.net_devices)


@dataclass(slots=True)
class _Read:
    agent_name: str
    nixl_handle: Any
    state: ReadState
    num_descriptors: int


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
        self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        if _BACKEND not in self._agent.backends:
            raise RuntimeError("NIXL has no UCX backend here")
        block_bytes = pool[0].numel() * pool.element_size()
        device_id = 0 if on_cpu else pool.get_device()
        mem_type: Literal["DRAM", "VRAM"] = "DRAM" if on_cpu else "VRAM"
        self._registrations: list[Any] = [self._register(pool)]
        # The metadata tell of what has been registered until now.
        self._address = NixlAddress(bytes(self._agent.get_agent_metadata()), pool.data_ptr(), device_id, mem_type)
        self._scratch = torch.empty(min(MAX_PROBE_BYTES, pool.nbytes), dtype=torch.uint8, device=pool.device)
        if not on_cpu:
            torch.cuda.synchronize(pool.device)  # what used that memory before: a read waits for no stream
        self._registrations.append(self._register(self._scratch))
        self._local = TransferPeer(
            replica_id=replica_id,
            epoch=epoch,
            agent_name=name,
            address=self._address.encode(),
            fingerprint=fingerprint,
            num_blocks=pool.shape[0],
            block_bytes=block_bytes,
        )
        self._peers: dict[str, tuple[TransferPeer, NixlAddress]] = {}
        self._removed: set[str] = set()  # peers still loaded in NIXL because of a read in flight
        self._reads: dict[int, _Read] = {}
        self._num_reads = 0
        self._closed = False
        blocks = f"{mem_type} pool, {pool.shape[0]} blocks of {block_bytes} bytes"
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
        try:
            loaded = _text(self._agent.add_remote_agent(address.agent_metadata))
        except Exception as error:
            raise PeerUnreachable(f"metadata of {peer.agent_name} is unusable: {error}") from error
        if loaded != peer.agent_name:
            if loaded not in self._peers and loaded not in self._removed:
                self._agent.remove_remote_agent(loaded)
            raise PeerUnreachable(f"metadata of {peer.agent_name} belongs to {loaded}")
        self._peers[peer.agent_name] = peer, address
        logger.info("NIXL agent %s: loaded peer %s (%s)", self._local.agent_name, peer.agent_name, address.mem_type)

    def remove_peer(self, agent_name: str) -> None:
        if self._peers.pop(agent_name, None) is not None:
            self._removed.add(agent_name)
            self._unload_if_idle(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        if agent_name not in self._peers:
            raise PeerUnreachable(f"{agent_name} is not loaded")
        try:
            self._agent.send_notif(agent_name, payload)
        except Exception as error:
            raise PeerUnreachable(f"cannot notify {agent_name}: {error}") from error

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        mail: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        return [(_text(sender), bytes(payload)) for sender, payloads in mail.items() for payload in payloads]

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

    def _start(self, peer: TransferPeer, local: list[_Region], remote: list[_Region], notice: bytes) -> ReadHandle:
        agent = self._agent
        try:
            here = agent.get_xfer_descs(local, self._address.mem_type)
            there = agent.get_xfer_descs(remote, self._loaded(peer).mem_type)
            nixl_handle = agent.initialize_xfer("READ", here, there, peer.agent_name, notice)
        except Exception as error:
            raise PeerUnreachable(f"cannot prepare a read from {peer.agent_name}: {error}") from error
        state = self._post(nixl_handle, peer.agent_name)
        handle = ReadHandle(peer.agent_name, self._num_reads)
        self._num_reads += 1
        self._reads[handle.read_id] = _Read(peer.agent_name, nixl_handle, state, len(local))
        return handle

    def poll_read(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle.read_id]
        if read.state is ReadState.READING:
            try:
                read.state = _STATES[self._agent.check_xfer_state(read.nixl_handle)]
            except nixlRemoteDisconnectError as error:
                logger.warning("read from %s failed: %s", handle.agent_name, error)
                read.state = ReadState.FAILED
            except Exception as error:  # of one descriptor, or NIXL has lost sight of the read; UCX has perhaps not
                read.state = _unknown(handle.agent_name, error)
        return read.state

    def release_read(self, handle: ReadHandle) -> None:
        read = self._reads[handle.read_id]
        if read.state not in _ENDED:
            raise ValueError("this read is still in flight")
        del self._reads[handle.read_id]
        self._release(read.nixl_handle)
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
            self._release(read.nixl_handle)
        self._reads.clear()
        for agent_name in [*self._peers, *self._removed]:
            self._unload(agent_name)
        for registration in self._registrations:
            self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._agent = None

    def _loaded(self, peer: TransferPeer) -> NixlAddress:
        """Raises PeerUnreachable unless it is loaded."""
        loaded, address = self._peers.get(peer.agent_name, (None, self._address))
        if loaded != peer:
            raise PeerUnreachable(f"{peer.agent_name} is not loaded")
        return address

    def _register(self, memory: torch.Tensor) -> Any:
        """memory: contiguous, on the pool's device. The registration."""
        on_cpu = memory.device.type == "cpu"
        region = [(memory.data_ptr(), memory.nbytes, 0 if on_cpu else memory.get_device(), "")]
        return self._agent.register_memory(region, "DRAM" if on_cpu else "VRAM")

    def _regions(self, at: NixlAddress, starts: list[int], runs: list[BlockRun]) -> list[_Region]:
        size = self._local.block_bytes  # the peer's are as large: `check_read`
        return [
            (at.base_address + start * size, run.num_blocks * size, at.device_id)
            for start, run in zip(starts, runs, strict=True)
        ]

    def _post(self, nixl_handle: Any, agent_name: str) -> ReadState:
        """Raises PeerUnreachable when the peer is gone: nothing was posted, or it has ended."""
        try:
            return _STATES[self._agent.transfer(nixl_handle)]
        except nixlRemoteDisconnectError as error:
            self._release(nixl_handle)
            raise PeerUnreachable(f"{agent_name} is gone: {error}") from error
        except Exception as error:
            return _unknown(agent_name, error)  # some descriptors may be under way, and cannot be recalled

    def _release(self, nixl_handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(nixl_handle)
        except Exception as error:
            logger.warning("NIXL did not release an ended read: %s", error)

    def _unload_if_idle(self, agent_name: str) -> None:
        if agent_name in self._removed and all(read.agent_name != agent_name for read in self._reads.values()):
            self._removed.discard(agent_name)
            self._unload(agent_name)

    def _unload(self, agent_name: str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:
            logger.warning("NIXL did not remove %s: %s", agent_name, error)


def _unknown(agent_name: str, error: Exception) -> ReadState:
    extra = {"event": "read_unknown", "peer": agent_name, "reason": repr(error)}
    logger.error("a read failed in part; its blocks are not used again until this engine restarts", extra=extra)
    return ReadState.UNKNOWN


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
