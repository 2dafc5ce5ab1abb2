"""Limits on latencies that make a request a good one."""

from __future__ import annotations

from collections.abc import Sequence

_GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """ "ttft:500" and the like, milliseconds, to seconds by name. Raises ValueError."""
    goodput = {}
    for limit in limits:
        name, _, milliseconds = limit.partition(":")
        if name not in _GOODPUT_NAMES:
            raise ValueError(f"a goodput limit is one of {', '.join(_GOODPUT_NAMES)} and milliseconds, not {limit!r}")
        goodput[name] = float(milliseconds) / 1000
    return goodput
