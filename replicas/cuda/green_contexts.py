"""Streams that keep to a part of a card's multiprocessors: green contexts, by the driver's own calls.

A graph that is captured on such a stream keeps to its part wherever it is replayed (seen on an H200, driver 580).
Needs a driver for CUDA 12.4. The contexts live as long as the process; one takes 5 MiB and 2 ms.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from replicas.cuda_driver import CudaDriver

_RESOURCE_BYTES = 144  # sizeof(CUdevResource)
_COUNT_AT = 96  # where its sm.smCount lies: behind its type and what is internal
_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which must be asked for
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class NoGreenContexts(Exception):
    """This driver or this card has none; says why."""


class GreenContexts:
    """Of one card. Makes nothing before it is asked."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        """library: libcuda, as ctypes has it; None: it is loaded. Raises NoGreenContexts."""
        torch.cuda.init()
        self._call = CudaDriver(NoGreenContexts, "12.4", library).call
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device.index or 0))
        self._whole = ctypes.create_string_buffer(_RESOURCE_BYTES)
        self._call("cuDeviceGetDevResource", self._device, self._whole, ctypes.c_int(_SM_RESOURCE))

    @property
    def num_processors(self) -> int:
        """Of the whole card."""
        return _count_of(self._whole.raw)

    def stream(self, num_processors: int) -> torch.cuda.Stream:
        """One that keeps to so many multiprocessors, the last ones: the others, a multiple of 8, are left alone. Raises
        NoGreenContexts.
        """
        alone, part = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(2))
        num_groups = ctypes.c_uint(1)
        self._call(
            "cuDevSmResourceSplitByCount", alone, ctypes.byref(num_groups), self._whole, part, ctypes.c_uint(0),
            ctypes.c_uint(self.num_processors - num_processors),
        )  # fmt: skip
        if _count_of(part.raw) != num_processors:
            raise NoGreenContexts(f"asked for {num_processors} multiprocessors, the card gave {_count_of(part.raw)}")
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), part, ctypes.c_uint(1))
        self._call("cuGreenCtxCreate", ctypes.byref(context), description, self._device, ctypes.c_uint(_DEFAULT_STREAM))
        self._call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0)
        )
        assert stream.value is not None
        return torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", self._device.value))


def _count_of(resource: bytes) -> int:
    return int.from_bytes(resource[_COUNT_AT : _COUNT_AT + 4], "little")
