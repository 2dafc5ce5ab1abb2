"""Routing to prefix caches, in all the ways that are compared, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation.prefix_routing import Setup, Trace, measure
from cluster.load.tables import table

SETUPS = (
    Setup("least load", 4, 860_000, has_index=False, is_spread=False),
    Setup("cost, as recorded", 4, 860_000, is_spread=False),
    Setup("least load", 4, 860_000, has_index=False),
    Setup("cost", 4, 860_000),
    Setup("cost, found late", 4, 860_000, finds_late=True),
    Setup("least load", 4, 860_000, 8, has_index=False),
    Setup("cost, own sends", 4, 860_000, 8, pulse_s=None),
    Setup("cost, pulses", 4, 860_000, 8),
    Setup("cost, pulses", 4, 860_000, 8, pulse_s=1.0),
    Setup("cost, pulses", 4, 860_000, 8, pulse_s=5.0),
    Setup("least load", 8, 860_000, has_index=False),
    Setup("cost", 8, 860_000),
    Setup("cost, own sends", 8, 860_000, 8, pulse_s=None),
    Setup("cost, pulses", 8, 860_000, 8),
)


def compare_prefix_routing(trace: Path, only: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Each setup over the whole trace."""
    known, rows = Trace(trace), []
    for index in only:
        row = measure(SETUPS[index], known)
        rows.append(row)
        say(prefix_routing_table({"rows": rows[-1:]}).splitlines()[-1])
    return {"rows": rows}


def prefix_routing_table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [
            row["name"],
            row["replicas"],
            f"{row['cache_tokens'] / 1e6:.2f} M",
            row["routers"],
            "-" if row["pulse_s"] is None else f"{row['pulse_s']:g}",
            "yes" if row["is_spread"] else "no",
            f"{100 * row['found']:.1f} %",
            f"{100 * row['expected']:.1f} %",
            *(f"{row[f'p{percent}_ttft_s']:.3f}" for percent in (50, 90, 99)),
            f"{row['route_us']:.0f}",
            f"{row['cpu_s']:.0f}",
        ]
        for row in result["rows"]
    ]
    header = ["policy", "prefill", "cache", "ingresses", "pulse s", "spread", "found", "expected"]
    return table([*header, "TTFT p50", "p90", "p99 s", "routing us", "CPU s"], rows)
