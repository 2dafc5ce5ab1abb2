"""Pools of other engines on this machine, opened here and read from directly; forgotten, they are let go of.

Only reads: what engines say to each other takes the transport's own way. Where a pool can't be opened (another machine,
a container that shares nothing with this one, a card that does not see the other) the transport reads it as it can.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from replicas.kv.cuda_ipc import Copy, Copying, CudaIpc, Exported, NoCudaIpc

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for each start of a machine's kernel

logger = logging.getLogger(__name__)


class NearAddress(NamedTuple):
    """Where a pool begins, for processes on the same machine."""

    machine: str
    handle: bytes
    offset: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(address: bytes) -> NearAddress | None:
        """None: it is none."""
        try:
            return msgspec.msgpack.decode(address, type=NearAddress)
        except (msgspec.MsgspecError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class _Opened:
    exported: Exported
    begin: int


class NearPools:
    """Of one transport, by agent. Its thread only."""

    def __init__(self, ipc: CudaIpc, pool_address: int, machine: str) -> None:
        """Raises NoCudaIpc."""
        self._ipc, self._pool_address, self._machine = ipc, pool_address, machine
        self.address = NearAddress(machine, *ipc.export(pool_address)).encode()
        self._opened: dict[str, _Opened] = {}

    def __contains__(self, agent_name: str) -> bool:
        """Whether it is open."""
        return agent_name in self._opened

    def may_open(self, address: bytes) -> bool:
        """Whether that pool is on this machine."""
        return self._near(address) is not None

    def open(self, agent_name: str, address: bytes) -> bool:
        """Whether its pool can be read from here, from now on. Idempotent. May block for some ms. Mutates."""
        if agent_name in self._opened:
            return True
        near = self._near(address)
        if near is None:
            return False
        exported = Exported(near.handle, near.offset)
        try:
            self._opened[agent_name] = _Opened(exported, self._ipc.open(exported))
        except NoCudaIpc as error:
            extra = {"event": "no_cuda_ipc", "peer": agent_name, "reason": str(error)}
            logger.warning("a pool on this machine can't be opened; UCX reads it as it can", extra=extra)
            return False
        return True

    def read(self, agent_name: str, pieces: Sequence[tuple[int, int, int]]) -> Copying:
        """From one that is open. pieces: an address here, an offset in the agent's pool, bytes. Does not block. Raises
        NoCudaIpc: then some bytes may land."""
        opened = self._opened[agent_name]
        return self._ipc.copy([Copy(to, opened.begin + offset, size) for to, offset, size in pieces])

    def forget(self, agent_name: str) -> None:
        """No read from it is under way. Mutates."""
        if (opened := self._opened.pop(agent_name, None)) is None:
            return
        try:
            self._ipc.close(opened.exported, opened.begin)
        except NoCudaIpc as error:
            extra = {"event": "pool_not_closed", "peer": agent_name, "reason": str(error)}
            logger.error("a pool that was read from stays in the card's memory until this process ends", extra=extra)

    def _near(self, address: bytes) -> NearAddress | None:
        """None: that pool is not on this machine."""
        near = NearAddress.decode(address)
        return near if near is not None and near.machine == self._machine else None


def near_pools(pool: torch.Tensor) -> NearPools | None:
    """Of a card. None: its memory can't be exported, or nobody can tell which machine this is, and the log says why; or
    the pool is on no card."""
    if not pool.is_cuda:
        return None
    machine = machine_id()
    if not machine:
        logger.warning("others read this pool by UCX only", extra={"event": "no_cuda_ipc", "reason": "no boot id"})
        return None
    try:
        return NearPools(CudaIpc(pool.device), pool.data_ptr(), machine)
    except NoCudaIpc as error:
        logger.warning("others read this pool by UCX only", extra={"event": "no_cuda_ipc", "reason": str(error)})
        return None


def machine_id() -> str:
    """The same for all processes on this machine, containers included, until it starts anew. Empty: nobody can tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
