"""Memory of another process on this machine's cards: exported, opened, copied from, and let go of, by driver calls.

UCX keeps open what it has opened until the process ends (openucx/ucx#11753): the pool of a replica that died then stays
in the card's memory for as long as anybody lives who has read from it, and its successor finds no room.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch

from replicas.cuda_driver import CudaDriver

_HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NUM_STREAMS = 2  # one copy's start hides behind another one's bytes


class NoCudaIpc(Exception):
    """This memory can't be exported, opened or copied from here; says why."""


class Exported(NamedTuple):
    """What another process needs to open an allocation. offset: of the address that was exported, in it."""

    handle: bytes
    offset: int


class Copy(NamedTuple):
    to: int
    origin: int
    num_bytes: int


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies under way."""

    ends: tuple[torch.cuda.Event, ...]

    def is_over(self) -> bool:
        """Does not block. Raises NoCudaIpc if the device has failed: then nobody knows what will still land."""
        try:
            return all(end.query() for end in self.ends)
        except RuntimeError as error:
            raise NoCudaIpc(str(error)) from error


class CudaIpc:
    """Of one card and one thread, the one that makes it."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        """library: libcuda, as ctypes has it; None: it is loaded. Raises NoCudaIpc."""
        self._call = CudaDriver(NoCudaIpc, "4.1", library).call
        self._streams = tuple(torch.cuda.Stream(device) for _ in range(_NUM_STREAMS))
        for stream in self._streams:
            _event_on(stream)  # the driver's calls want this thread to have a context
        self._next_stream = cycle(self._streams)

    def export(self, address: int) -> Exported:
        """Of the allocation around this address. Raises NoCudaIpc."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Exported(ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES), address - base.value)

    def open(self, exported: Exported) -> int:
        """Where the exported address lies in this process, until `close`. Raises NoCudaIpc."""
        if len(exported.handle) != _HANDLE_BYTES:
            raise NoCudaIpc(f"a handle of {len(exported.handle)} bytes")
        base, handle = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(handle), exported.handle, _HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return base.value + exported.offset

    def close(self, exported: Exported, address: int) -> None:
        """What `open` gave. Nothing may be copied from there any more. May wait for the device. Raises NoCudaIpc."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address - exported.offset))

    def copy(self, copies: Sequence[Copy]) -> Copying:
        """Start them, in any order. Does not block. Raises NoCudaIpc: then some may be under way."""
        for stream, one in zip(self._next_stream, copies, strict=False):
            self._call(
                "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(one.to), ctypes.c_uint64(one.origin),
                ctypes.c_size_t(one.num_bytes), ctypes.c_void_p(stream.cuda_stream),
            )  # fmt: skip
        return Copying(tuple(_event_on(stream) for stream in self._streams))


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
