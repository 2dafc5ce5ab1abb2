"""What a machine has, as facts. Gathered by `machine_probe`."""

from __future__ import annotations

from dataclasses import dataclass

_GB = 10**9
# What is neither weights nor KV: Ray, ingress and HTTP; an engine's libraries and the work of a step.
RAY_BYTES, ENGINE_BYTES = 1_000_000_000, 750_000_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory_bytes: 0 where it is not told. capability: CUDA's, major and minor; (0, 0) where it is not known."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use, container limits included. num_cores: may be a fraction. available_bytes: of the
    memory what nobody uses now. cores_limit, memory_limit: what sets the number, where it is not the machine itself.
    no_gpu: why there is none.
    """

    num_cores: float
    memory_bytes: int
    available_bytes: int
    gpus: tuple[Gpu, ...] = ()
    cores_limit: str = ""
    memory_limit: str = ""
    no_gpu: str = ""


def show_bytes(num_bytes: float) -> str:
    """In the unit that people compare: "377 MB", "1.1 GB"."""
    return f"{num_bytes / _GB:.1f} GB" if num_bytes >= 0.9995 * _GB else f"{num_bytes / 10**6:.0f} MB"


def show_cores(num_cores: float) -> str:
    return f"{num_cores:g} core{'' if num_cores == 1 else 's'}"
