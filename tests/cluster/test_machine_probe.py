"""What a machine has, by the files and the library that say so."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.launch.gpu_probe import NoGpus, read_gpus
from cluster.launch.machine import Gpu, Machine, show_bytes
from cluster.launch.machine_probe import machine_of

GIB = 1024**3
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\nHugePages_Total: 0\n"
UNLIMITED = 9223372036854771712


def root_of(tmp_path: Path, files: dict[str, object]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))
    return tmp_path


def machine(tmp_path: Path, files: dict[str, object]) -> Machine:
    return machine_of(root_of(tmp_path, files), 8, (), "")


# What a machine of 8 cores and 16 GiB, 12 of them free, may use of them: cores, GiB, GiB free.
LIMITS: dict[str, tuple[dict[str, object], tuple[float, float, float]]] = {
    "no control groups": ({}, (8, 16, 12)),
    "no limits": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"},
        (8, 16, 12),
    ),
    "version 2": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": 3 * GIB,
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        },
        (1.5, 4, 3),
    ),
    "version 2, a limit of a group around": (
        {
            "proc/self/cgroup": "0::/user.slice/app\n",
            "sys/fs/cgroup/user.slice/app/memory.max": 8 * GIB,
            "sys/fs/cgroup/user.slice/app/memory.current": 1 * GIB,
            "sys/fs/cgroup/user.slice/memory.max": 2 * GIB,
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
        },
        (2, 2, 2),
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {1 * GIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
        },
        (3, 6, 5),
    ),
    "version 1 in a container that does not see its own name": (
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        (8, 6, 6),
    ),
    "version 1, unlimited": (
        {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED},
        (8, 16, 12),
    ),
    "a limit above what there is": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": 64 * GIB, "sys/fs/cgroup/cpu.max": "6400000 100000"},
        (8, 16, 12),
    ),
    "less free than the limit leaves": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": 15 * GIB, "sys/fs/cgroup/memory.current": 0},
        (8, 15, 12),
    ),
    "nonsense": (
        {"proc/self/cgroup": "what\n\n0::/\n", "sys/fs/cgroup/cpu.max": "x y", "sys/fs/cgroup/memory.max": "-"},
        (8, 16, 12),
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_a_container_count(name: str, tmp_path: Path) -> None:
    files, (cores, total, available) = LIMITS[name]
    found = machine(tmp_path, files)
    assert (found.num_cores, found.memory_bytes / GIB, found.available_bytes / GIB) == (cores, total, available)
    assert (found.cores_limit, found.memory_limit) == (
        "the container's limit" if cores < 8 else "",
        "the container's limit" if total < 16 else "",
    )


def test_this_machine_can_be_looked_at() -> None:
    found = machine_of(Path("/"), 1, (), "")
    assert 0 < found.available_bytes <= found.memory_bytes


def nvml(*gpus: Gpu, init: int = 0) -> Any:
    """What acts like the driver's library, as far as it is called. A GPU without a name can't be read."""

    def set_of(pointer: Any, kind: Any, value: int) -> None:
        ctypes.cast(pointer, ctypes.POINTER(kind)).contents.value = value

    def count(pointer: Any) -> int:
        set_of(pointer, ctypes.c_uint, len(gpus))
        return 0

    def handle(index: Any, pointer: Any) -> int:
        set_of(pointer, ctypes.c_void_p, index.value + 1)
        return 0 if gpus[index.value].name else 15

    def name(device: Any, buffer: Any, _: Any) -> int:
        buffer.value = gpus[device.value - 1].name.encode()
        return 0

    def memory(device: Any, pointer: Any) -> int:
        set_of(pointer, ctypes.c_ulonglong, gpus[device.value - 1].memory_bytes)
        return 0 if gpus[device.value - 1].memory_bytes else 3

    def capability(device: Any, major: Any, minor: Any) -> int:
        for pointer, value in zip((major, minor), gpus[device.value - 1].capability, strict=True):
            set_of(pointer, ctypes.c_int, value)
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: init,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetName=name,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=capability,
    )


CARDS = (Gpu("NVIDIA A", 80 * GIB, (9, 0)), Gpu("NVIDIA B", 40 * GIB, (8, 0)))


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("GPU-abc", 1), ("0,1,2", 2), ("0,-1", 1)]
)
def test_gpus_are_counted_as_ray_counts_them(visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read_gpus(nvml(*CARDS), environment) == CARDS[:count]


def test_a_gpu_that_shares_the_machines_memory_counts() -> None:
    shared = Gpu("NVIDIA GB10", 0, (12, 1))
    assert read_gpus(nvml(shared), {}) == (shared,)


def test_a_gpu_that_can_not_be_read_is_none() -> None:
    assert read_gpus(nvml(CARDS[0], Gpu("", 0)), {}) == CARDS[:1]


@pytest.mark.parametrize(
    ("library", "environment", "reason"),
    [
        (nvml(*CARDS, init=9), {}, "the NVIDIA driver does not answer"),
        (nvml(), {}, "knows no GPU"),
        (nvml(Gpu("", 0)), {}, "does not let its GPUs be read"),
        (nvml(*CARDS), {"CUDA_VISIBLE_DEVICES": ""}, 'CUDA_VISIBLE_DEVICES is ""'),
        (nvml(*CARDS), {"CUDA_VISIBLE_DEVICES": "-1"}, 'CUDA_VISIBLE_DEVICES is "-1"'),
    ],
)
def test_why_there_is_none_is_said(library: Any, environment: dict[str, str], reason: str) -> None:
    with pytest.raises(NoGpus, match=reason):
        read_gpus(library, environment)


def test_bytes_are_shown_in_the_unit_that_people_compare() -> None:
    shown = [show_bytes(number) for number in (377_487_360, 999_499_999, 999_600_000, 16_060_522_496)]
    assert shown == ["377 MB", "999 MB", "1.0 GB", "16.1 GB"]
