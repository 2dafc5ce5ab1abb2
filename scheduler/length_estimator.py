"""How long outputs are, learned from those that ended."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque


class LengthEstimator:
    """A quantile of output length, given how much there is already. One per engine: what it serves differs.

    Remembers the last `window` choices. An output that was cut by its max_tokens counts with the length it had.
    """

    def __init__(self, quantile: float, min_samples: int = 64, window: int = 2048) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """A choice has ended with so many tokens. O(window) in one move of memory. Mutates."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    def estimate(self, num_generated: int) -> int | None:
        """The quantile of the lengths beyond num_generated, so always more than that. None: too few are known."""
        first = bisect_right(self._sorted, num_generated)
        num_longer = len(self._sorted) - first
        if len(self._sorted) < self._min_samples or num_longer < max(1, self._min_samples // 8):
            return None
        return self._sorted[first + math.ceil(self._quantile * num_longer) - 1]
