"""What a campaign has come to: its rows beside what they are to reach, goodputs, the anchor beside vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cache_rows import HEAD, cache_rows
from benchmarks.gpu.campaign_record import CampaignRecord, Line
from benchmarks.gpu.campaign_servers import Workload
from benchmarks.gpu.goodput_search import best, crossing
from benchmarks.gpu.mask_load import cost_rows
from benchmarks.gpu.quantised_table import quantised_rows
from benchmarks.gpu.saturated_load import HEAD as SATURATED_HEAD
from benchmarks.gpu.saturated_load import saturated_rows
from cluster.load.tables import table

_ANCHOR = ("vllm", "2048/128", 8.0)
_ANCHOR_WITHIN = 0.03


@dataclass(frozen=True, slots=True)
class Target:
    """A run, and the most that each of its figures may be. beside: another piece at the same rate, whose figure is
    multiplied by the limit."""

    piece: str
    workload: str
    rate: float
    limits: Mapping[str, float]
    beside: str | None = None


TARGETS = (
    Target("split", "2048/128", 4.0, {"failed": 0, "p90_tpot_ms": 9.0}),
    Target("split-slow", "2048/128", 4.0, {"failed": 0}),
    Target("split-slow", "2048/128", 4.0, {"p90_second_token_ms": 1.3, "p90_tpot_ms": 1.3}, beside="colocated"),
    Target("lanes", "2048/128", 8.0, {"failed": 0, "p99_itl_ms": 15.0, "p90_tpot_ms": 9.0, "p90_ttft_ms": 300.0}),
    Target("lanes", "2048/128", 12.0, {"failed": 0, "p90_tpot_ms": 13.0, "p99_itl_ms": 20.0, "p90_ttft_ms": 800.0}),
)
_STEPS_MS = {1: 4.19, 16: 5.20, 64: 7.47, 256: 16.95}
_GOODPUT_TARGETS = {"2048/128": 1.3, "8192/256": 1.0, "512/512": 1.0}  # times vLLM's


def as_text(record: CampaignRecord, workloads: Mapping[str, Workload], kept: Mapping[str, Any]) -> str:
    """kept: vLLM's figures of earlier machines, with the script."""
    rows = [[piece, *map(str, cells)] for piece, *cells in _judged(record)]
    parts = [table(["", "figure", "measured", "to reach", ""], rows)] if rows else []
    if costs := cost_rows(record, _verdict):
        parts.append(table(["what masks cost", "plain, ms", "held, ms", "+ %", "to reach", ""], costs))
    if caches := cache_rows(record, _verdict):
        parts.append(table(HEAD, caches))
    if saturated := saturated_rows(record, _verdict):
        parts.append(table(SATURATED_HEAD, saturated))
    if quantised := quantised_rows(record):
        parts.append(table(["weights or KV of few bits", "ours", "vLLM", "better by", "to reach", ""], quantised))
    with_kept = CampaignRecord((), ())
    with_kept.lines = [*({**line, "piece": "vllm"} for line in kept["runs"]), *record.lines]
    goodputs = [row for name, load in workloads.items() if (row := _goodput(with_kept, name, load)) is not None]
    if goodputs:
        parts.append(table(["goodput, req/s", "two lanes", "vLLM", "ratio", "to reach"], goodputs))
    parts += _of_several(record, workloads)
    if (anchor := _anchor(record, kept)) is not None:
        parts.append(anchor)
    wrong = {line["piece"]: line["error"].splitlines()[0][:160] for line in record.lines if "error" in line}
    parts += [f"WENT WRONG: {piece}: {error}" for piece, error in wrong.items()]
    return "\n\n".join(parts)


def _judged(record: CampaignRecord) -> list[list[Any]]:
    rows = []
    if (handoff := record.of("handoff")) is not None and "256_mib_first_median_best_ms" in handoff:
        median_ms = handoff["256_mib_first_median_best_ms"][1]
        rows.append(["handoff", "256 MiB, ms", median_ms, 2.0, _verdict(median_ms, 2.0)])
    if (steps := record.of("steps-two")) is not None:
        for batch, limit_ms in _STEPS_MS.items():
            if (step_ms := steps.get(f"step_{batch}_ms")) is not None:
                rows.append(["steps-two", f"{batch} rows, ms", step_ms, limit_ms, _verdict(step_ms, limit_ms * 1.03)])
    for target in TARGETS:
        run = record.of(target.piece, target.workload, target.rate)
        other = record.of(target.beside, target.workload, target.rate) if target.beside else None
        if run is None or (target.beside and other is None):
            continue
        for name, limit in target.limits.items():
            most = limit if other is None else round(limit * other[name], 2)
            rows.append([f"{target.piece} at {target.rate:g}", name, run[name], most, _verdict(run[name], most)])
    return rows


def _verdict(value: float, most: float) -> str:
    return "reached" if value <= most else f"missed by {100 * (value / most - 1):.1f} %" if most else "missed"


def _goodput(record: CampaignRecord, name: str, workload: Workload) -> list[str] | None:
    """The highest rate that was good; in brackets where the limit would be met between the runs."""
    own = "lanes-8192" if name == "8192/256" else "lanes"
    ours, theirs = (record.points(piece, name, workload.limits) for piece in (own, "vllm"))
    mine, other = best(ours), best(theirs)
    if mine is None and other is None:
        return None
    cells = [
        "-" if point is None else f"{point.rate:g} ({between or 'more'})"
        for point, between in ((mine, crossing(ours)), (other, crossing(theirs)))
    ]
    mid, limit = crossing(ours), crossing(theirs)
    ratio = f"{mid / limit:.2f}" if mid is not None and limit is not None else "-"
    return [name, *cells, ratio, f"{_GOODPUT_TARGETS[name]:g}"]


def _of_several(record: CampaignRecord, workloads: Mapping[str, Workload]) -> list[str]:
    """Goodput of two and of four cards, by layout: as of one card."""
    tables = []
    for beginning, title in (("pair-", "two cards, req/s"), ("four-", "four cards, req/s")):
        rows = []
        for piece in sorted({line["piece"] for line in record.lines if line["piece"].startswith(beginning)}):
            found = [record.points(piece, name, load.limits) for name, load in workloads.items()]
            cells = [
                "-" if (point := best(points)) is None else f"{point.rate:g} ({crossing(points) or 'more'})"
                for points in found
            ]
            if any(found):
                rows.append([piece, *cells])
        if rows:
            tables.append(table([title, *workloads], rows))
    return tables


def _anchor(record: CampaignRecord, kept: Mapping[str, Any]) -> str | None:
    """Whether this machine is like those of the kept figures."""
    piece, workload, rate = _ANCHOR
    run: Line | None = record.of(piece, workload, rate)
    then = next((line for line in kept["runs"] if (line["workload"], line["rate"]) == (workload, rate)), None)
    if run is None or then is None:
        return None
    ratio = run["p50_tpot_ms"] / then["p50_tpot_ms"]
    told = "as then" if abs(ratio - 1) <= _ANCHOR_WITHIN else "NOT as then: vLLM's figures are to be searched again"
    return f"anchor, vLLM {workload} at {rate:g}: TPOT p50 {run['p50_tpot_ms']:.2f} ms, {ratio:.3f} of the kept; {told}"
