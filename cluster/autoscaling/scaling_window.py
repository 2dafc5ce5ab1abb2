"""What a pool needed lately: the least and the most over sliding windows, and when it last had work. Immutable.

The rule is Kubernetes' stabilisation windows (HorizontalPodAutoscaler v2): grow to the least that was needed throughout
the one, shrink to the most that was needed at any time of the other. A need that comes and goes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.autoscaling.scaling_rules import Delays

Samples = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that a pool's work takes now. is_busy: whether there is any.

    to_keep: with a margin, so that it does not shrink to the edge; at least to_grow.
    """

    to_grow: int
    to_keep: int
    is_busy: bool


@dataclass(frozen=True, slots=True)
class ScalingWindow:
    """Times are the injected clock's seconds. grow, keep: samples that can still become the least or the most."""

    grow: Samples
    keep: Samples
    busy_at_s: float

    @staticmethod
    def begin(now_s: float, num_replicas: int) -> ScalingWindow:
        """As if so many had been needed until now: nothing changes before a window has passed."""
        return ScalingWindow(((now_s, num_replicas),), ((now_s, num_replicas),), now_s)

    def seen(self, now_s: float, need: Need, delays: Delays) -> ScalingWindow:
        """With one more sample. O(different values)."""
        grow = _push(self.grow, now_s, need.to_grow, now_s - delays.up_s, lambda kept, new: kept < new)
        keep = _push(self.keep, now_s, need.to_keep, now_s - delays.down_s, lambda kept, new: kept > new)
        return ScalingWindow(grow, keep, now_s if need.is_busy else self.busy_at_s)

    def decide(self, now_s: float, target: int, need: Need, delays: Delays, bounds: tuple[int, int]) -> int:
        """The number of replicas to have. target: what it is now. bounds: fewest and most. After `seen`."""
        least, most = bounds
        wanted = target
        if target == 0:
            wanted = max(1, need.to_grow) if need.is_busy else 0  # a cold start: somebody waits
        elif self.grow[0][1] > target:
            wanted = self.grow[0][1]
        elif self.keep[0][1] < target:
            wanted = max(1, self.keep[0][1])
        elif target == 1 and now_s - self.busy_at_s >= delays.to_zero_s and not need.is_busy:
            wanted = 0
        return max(least, min(most, wanted))


def _push(samples: Samples, now_s: float, value: int, oldest_s: float, outlasts: Callable[[int, int], bool]) -> Samples:
    """A monotonic queue: its first is the extreme of the window; what a newer one undercuts can't become that."""
    kept = [sample for sample in samples if sample[0] > oldest_s and outlasts(sample[1], value)]
    return (*kept, (now_s, value))
