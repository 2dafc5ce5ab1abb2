"""What measured times of both lanes make of the ways to divide a card; or that they can't be true.

Pure. Measured at start, as cards, models and drivers differ: `lane_split` has estimates for where that fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.lane_split import LaneShare

# Beyond these a measurement was disturbed, or did not measure what it should have.
_RATES = (0.05, 1.15)
_GAINS = (0.6, 1.9)
_MOST_BACKWARDS = 1.1  # prompts are as much slower at most with more of the card


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Seconds of a step of prompts and of a step of rows: alone on the whole card, or beside each other."""

    prompts_s: float
    rows_s: float


class AbsurdTimes(Exception):
    """Says which time can't be true."""


def measured_by(alone: LaneTimes, beside: Mapping[LaneShare, LaneTimes]) -> tuple[LaneShare, ...]:
    """The shares with the rates that were measured, in their order. Raises AbsurdTimes."""
    if not all(math.isfinite(s) and s > 0.0 for times in (alone, *beside.values()) for s in _seconds(times)):
        raise AbsurdTimes("a step took no time, or no end")
    shares = [_share(share, alone, times) for share, times in beside.items()]
    by_size = sorted(shares, key=lambda share: share.num_processors or 0)
    for less, more in pairwise(by_size):
        if less.prefill_rate > more.prefill_rate * _MOST_BACKWARDS:
            raise AbsurdTimes(
                f"prompts have {less.prefill_rate:.2f} of their rate on {less.num_processors} multiprocessors and "
                f"{more.prefill_rate:.2f} on {more.num_processors}"
            )
    return tuple(replace(s, prefill_rate=min(1.0, s.prefill_rate), decode_rate=min(1.0, s.decode_rate)) for s in shares)


def _share(share: LaneShare, alone: LaneTimes, beside: LaneTimes) -> LaneShare:
    measured = LaneShare(share.num_processors, alone.prompts_s / beside.prompts_s, alone.rows_s / beside.rows_s)
    for name, rate in (("prompts", measured.prefill_rate), ("rows", measured.decode_rate)):
        if not _RATES[0] <= rate <= _RATES[1]:
            raise AbsurdTimes(f"{name} have {rate:.2f} of their rate with {share.num_processors} for prompts")
    if not _GAINS[0] <= measured.gain <= _GAINS[1]:
        raise AbsurdTimes(f"both lanes do {measured.gain:.2f} of one's work with {share.num_processors} for prompts")
    return measured


def _seconds(times: LaneTimes) -> tuple[float, float]:
    return times.prompts_s, times.rows_s
