"""A committed dashboard, and its queries as Prometheus would get them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "helm" / "dashboards"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
# What Grafana puts in for a variable of which all values are chosen, and for a range of an hour.
_VARIABLES = {"$namespace": ".*", "$model_name": ".*", "$replica": ".*", "$__rate_interval": "1m"}


@dataclass(frozen=True, slots=True)
class Query:
    legend: str
    expr: str  # as in the file
    promql: str  # with all variables filled in


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    kind: str  # "timeseries", "stat", "heatmap", "row"
    unit: str
    place: tuple[int, int, int, int]  # x, y, width, height, of 24 columns
    queries: tuple[Query, ...]
    is_stacked: bool


def load(file: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(file.read_text())
    return board


def panels_of(board: dict[str, Any], rate_interval: str = "1m") -> Iterator[Panel]:
    """Rows too, which have no queries."""
    for panel in board["panels"]:
        place = panel["gridPos"]
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        yield Panel(
            panel["title"],
            panel["type"],
            defaults.get("unit", ""),
            (place["x"], place["y"], place["w"], place["h"]),
            tuple(_query(target, rate_interval) for target in panel.get("targets", ())),
            defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        )


def _query(target: dict[str, Any], rate_interval: str) -> Query:
    promql = target["expr"]
    for name, value in {**_VARIABLES, "$__rate_interval": rate_interval}.items():
        promql = promql.replace(name, value)
    assert not re.search(r"\$", promql), f"an unknown variable in {promql}"
    return Query(target["legendFormat"], target["expr"], promql)
