"""Gaps between tokens: hundreds of millions of them, in buckets."""

from __future__ import annotations

import math
from collections import Counter

# Buckets a factor of 1.002 wide: a percentile is at most 0.1 % off.
_PER_E = 500
_LEAST_S = 1e-9


class GapHistogram:
    """Counts of durations by the logarithm of their length."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.max_s = 0.0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Mutates."""
        self._counts[round(_PER_E * math.log(gap_s if gap_s > _LEAST_S else _LEAST_S))] += count
        if gap_s > self.max_s:
            self.max_s = gap_s

    def merge(self, other: GapHistogram) -> None:
        """Take in another one. Mutates."""
        self._counts.update(other._counts)
        self.max_s = max(self.max_s, other.max_s)

    def __len__(self) -> int:
        return self._counts.total()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GapHistogram) and self._counts == other._counts and self.max_s == other.max_s

    def __hash__(self) -> int:
        return id(self)

    def percentile(self, percent: float) -> float:
        """In seconds: the middle of the bucket in which the nearest one lies. NaN of nothing."""
        rank = max(1, math.ceil(len(self) * percent / 100))
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return math.exp(bucket / _PER_E)
        return math.nan

    def mean_s(self) -> float:
        """NaN of nothing."""
        total = sum(count * math.exp(bucket / _PER_E) for bucket, count in self._counts.items())
        return total / len(self) if self._counts else math.nan
