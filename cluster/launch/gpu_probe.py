"""Counts GPUs as Ray will: by NVML, the driver's own library, and CUDA_VISIBLE_DEVICES. No CUDA context is made.

Called by ctypes. torch is not for `cluster`; nvidia-smi is a program that many images lack, where the library is there
wherever a container is given a GPU; and Ray's copy of pynvml would bring Ray with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from cluster.launch.machine import Gpu

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


class NoGpus(Exception):
    """There is none; the message says why, in a few words."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that replicas can be given; at least one. Takes up to a second. Raises NoGpus."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise NoGpus("no NVIDIA driver found") from None
    return read_gpus(library, environment)


def read_gpus(library: Any, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """library: NVML, or what acts like it. As `visible_gpus`."""
    code = library.nvmlInit_v2()
    if code:
        raise NoGpus(f"the NVIDIA driver does not answer (NVML error {code}; what does nvidia-smi say?)")
    try:
        count = ctypes.c_uint()
        code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if code or not count.value:
            raise NoGpus("the NVIDIA driver knows no GPU")
        gpus = [gpu for index in range(count.value) if (gpu := _read(library, index))]
    finally:
        library.nvmlShutdown()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # Ray counts the names; which card each is does not matter here, cards of one machine being alike.
        names = [name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
        gpus = gpus[: len(names)]
        if not gpus:
            raise NoGpus(f'CUDA_VISIBLE_DEVICES is "{visible}"')
    if not gpus:
        raise NoGpus("the NVIDIA driver does not let its GPUs be read")
    return tuple(gpus)


def _read(library: Any, index: int) -> Gpu | None:
    """None for one that is lost, or not this user's."""
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
        return None
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES))
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        memory.total = 0  # of a GPU that shares the machine's memory NVML does not tell any
    library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(errors="replace") or "GPU", memory.total, (major.value, minor.value))
