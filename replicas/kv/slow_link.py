"""A connection of so many bytes a second, for simulations and tests: who comes first is first through. Pure."""

from __future__ import annotations


class SlowLink:
    """Time is monotonic seconds."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def ends_s(self, num_bytes: int, bytes_per_s: float, now_s: float) -> float:
        """When these bytes are through, behind all that were sent before. Mutates."""
        self._free_s = max(now_s, self._free_s) + num_bytes / bytes_per_s
        return self._free_s
