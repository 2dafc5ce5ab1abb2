"""When requests are sent: seconds from the start of a run, ascending. Pure and seeded: no clock, no I/O.

Open loop: nothing here knows whether the server keeps up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum


class Arrival(StrEnum):
    """How requests are spread in time."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    TRACE = "trace"


def gamma_arrivals(rate_per_s: float, burstiness: float, num_requests: int, seed: int) -> list[float]:
    """Gaps are drawn from a gamma distribution of mean 1 / rate and shape `burstiness`.

    As in `vllm bench serve`: 1 is Poisson, below it is burstier, above it more even. The gaps' standard deviation is
    mean / sqrt(burstiness). An infinite rate sends everything at once. Raises ValueError.
    """
    if burstiness <= 0:
        raise ValueError(f"burstiness must be above 0, not {burstiness}")
    mean_gap_s = _mean_gap_s(rate_per_s)
    rng = random.Random(f"arrivals {seed}")
    now_s, times_s = 0.0, []
    for _ in range(num_requests):
        times_s.append(now_s)
        now_s += rng.gammavariate(burstiness, mean_gap_s / burstiness) if mean_gap_s else 0.0
    return times_s


def poisson_arrivals(rate_per_s: float, num_requests: int, seed: int) -> list[float]:
    """A Poisson process: exponential gaps. Raises ValueError."""
    return gamma_arrivals(rate_per_s, 1.0, num_requests, seed)


def constant_arrivals(rate_per_s: float, num_requests: int) -> list[float]:
    """Equal gaps. Raises ValueError."""
    mean_gap_s = _mean_gap_s(rate_per_s)
    return [index * mean_gap_s for index in range(num_requests)]


def trace_arrivals(timestamps_s: Sequence[float], rate_per_s: float | None = None) -> list[float]:
    """Recorded times, from their first one on; with a rate, stretched or shrunk as a whole to that mean rate.

    The mean rate of n requests is (n - 1) / (last - first). Raises ValueError for a rate that cannot be had.
    """
    first_s = min(timestamps_s, default=0.0)
    times_s = sorted(timestamp_s - first_s for timestamp_s in timestamps_s)
    if rate_per_s is None or len(times_s) < 2:
        return times_s
    wanted_s = (len(times_s) - 1) * _mean_gap_s(rate_per_s)
    if times_s[-1] == 0 and wanted_s:
        raise ValueError("the trace's requests all come at the same time: there is no rate to change")
    factor = wanted_s / times_s[-1] if wanted_s else 0.0
    return [time_s * factor for time_s in times_s]


def _mean_gap_s(rate_per_s: float) -> float:
    if not rate_per_s > 0:
        raise ValueError(f"the rate must be above 0, not {rate_per_s}")
    return 0.0 if math.isinf(rate_per_s) else 1.0 / rate_per_s
