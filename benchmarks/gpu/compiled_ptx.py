"""What a kernel of Triton's was compiled to in this process."""

from __future__ import annotations

from typing import Any


def most_in_ptx(kernel: Any, text: str) -> int | str:
    """How often the text stands in the PTX of that variant of the kernel where it stands most often. Why not, where
    that is not known: another Triton keeps them otherwise."""
    try:
        compiled = [found for caches in kernel.device_caches.values() for found in caches[0].values()]
        return max((found.asm["ptx"].count(text) for found in compiled), default=0)
    except (AttributeError, KeyError, TypeError) as error:
        return f"not known: {error}"
