"""What kernels of Triton's were compiled to in this process."""

from __future__ import annotations

from types import ModuleType


def counts_in_ptx(module: ModuleType, text: str) -> dict[str, int | str]:
    """By each kernel of a module how often the text stands in the PTX of that variant where it stands most often. Why
    not, where that is not known: another Triton keeps them otherwise."""
    counts: dict[str, int | str] = {}
    for kernel in [kernel for kernel in vars(module).values() if hasattr(kernel, "device_caches")]:
        try:
            compiled = [found for caches in kernel.device_caches.values() for found in caches[0].values()]
            counts[kernel.__name__] = max((found.asm["ptx"].count(text) for found in compiled), default=0)
        except (AttributeError, KeyError, TypeError) as error:
            counts[kernel.__name__] = f"not known: {error}"
    return counts
