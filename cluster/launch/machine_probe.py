"""Looks at this machine: cores, memory, GPUs, and what a container may use of them. Only reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.launch.cgroup_limits import cgroup_limits
from cluster.launch.gpu_probe import NoGpus, visible_gpus
from cluster.launch.machine import Gpu, Machine


def look_at_machine(environment: Mapping[str, str]) -> Machine:
    """Takes a second at most. environment: CUDA_VISIBLE_DEVICES counts."""
    gpus: tuple[Gpu, ...] = ()
    no_gpu = ""
    try:
        gpus = visible_gpus(environment)
    except NoGpus as reason:
        no_gpu = str(reason)
    return machine_of(Path("/"), len(os.sched_getaffinity(0)), gpus, no_gpu)


def machine_of(root: Path, num_cpus: int, gpus: tuple[Gpu, ...], no_gpu: str) -> Machine:
    """root: where proc and sys are. num_cpus: that this process may run on."""
    limits = cgroup_limits(root)
    total, available = _memory(root)
    num_cores, cores_limit = float(num_cpus), ""
    if limits.num_cores is not None and limits.num_cores < num_cores:
        num_cores, cores_limit = limits.num_cores, "the container's limit"
    memory_limit = ""
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        total, memory_limit = limits.memory_bytes, "the container's limit"
    if limits.free_bytes is not None:
        available = min(available, limits.free_bytes)
    return Machine(num_cores, total, available, gpus, cores_limit, memory_limit, no_gpu)


def _memory(root: Path) -> tuple[int, int]:
    """Of the machine: all, and what is available."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemTotal"]) * 1024
