"""The prefix cache in a campaign's table: what a hit takes, beside vLLM's, and what the cache costs where none is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.campaign_record import CampaignRecord, Line

# Engine ms of a prompt of 8,192 that is here; percent that steps, prompts and requests may take more with the cache.
WARM_MS, MORE_PERCENT = 20.0, 0.5
_THEIRS = "vllm-cache"
_OURS = ("colocated-cache", "lanes-cache")
_FIGURES = ("cold_ttft_ms", "warm_ttft_ms", "first_p50_ttft_ms", "later_p50_ttft_ms", "later_p90_ttft_ms")
_FIGURES += ("p90_tpot_ms", "wall_s")
_SHARES = ("cached_share", "later_cached_share")
HEAD = ["prefix cache", "figure", "measured", "beside it", "ratio", "to reach", ""]


def cache_rows(record: CampaignRecord, verdict: Callable[[float, float], str]) -> list[list[str]]:
    """Cells of a table under HEAD; beside ours is vLLM's, beside the cache's what the same engine takes without it.

    verdict: of a figure, and the most that it may be.
    """
    rows: list[list[Any]] = []
    if (steps := record.of("cache-steps")) is not None:
        warm_ms, cold_ms = steps["warm_ms"], steps["cold_ms"]
        rows.append(["cache-steps", "again, ms", warm_ms, cold_ms, f"{warm_ms / cold_ms:.3f}", WARM_MS])
        rows[-1].append(verdict(warm_ms, WARM_MS))
        for name in (key.removesuffix("_more_percent") for key in steps if key.endswith("_more_percent")):
            ratio = 1 + steps[f"{name}_more_percent"] / 100
            figure = f"{name}, ms; twice off {steps[f'{name}_apart_percent']:.1f} % apart"
            cells = ["cache-steps", figure, steps[f"{name}_on_ms"], steps[f"{name}_off_ms"], f"{ratio:.4f}"]
            most = 1 + MORE_PERCENT / 100
            rows.append([*cells, f"{most:g}", verdict(ratio, most)])
    for piece in (*_OURS, _THEIRS):
        for line in _runs(record, piece):
            rows += _served(line, record.of(_THEIRS, line["workload"]), verdict)
    return [list(map(str, row)) for row in rows]


def _runs(record: CampaignRecord, piece: str) -> list[Line]:
    names = dict.fromkeys(line["workload"] for line in record.lines if line["piece"] == piece and line["workload"])
    return [line for name in names if (line := record.of(piece, name)) is not None]


def _served(line: Line, theirs: Line | None, verdict: Callable[[float, float], str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for figure in (name for name in (*_FIGURES, *_SHARES) if name in line):
        cells = [line["piece"], f"{line['workload']}: {figure}", line[figure]]
        if line["piece"] == _THEIRS or theirs is None:
            rows.append([*cells, "-", "-", "-", ""])
            continue
        ratio = line[figure] / theirs[figure]
        # Shares: the more the better.
        judged = verdict(1 / ratio if figure in _SHARES else ratio, 1.0)
        rows.append([*cells, theirs[figure], f"{ratio:.3f}", "1", judged])
    return rows
