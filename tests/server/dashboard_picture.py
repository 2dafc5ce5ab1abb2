"""A dashboard drawn as Grafana would lay it out, from a real Prometheus' answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter

from tests.monitoring.dashboard_file import Panel
from tests.server.prometheus_server import Points

# legend -> points, of one panel
Drawn = Mapping[str, Points]

_CELL_INCHES = (0.75, 0.36)
_COLUMNS = 24
_MOST_LEGENDS = 9  # of more only those above zero are named


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend format, filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def draw(title: str, panels: list[Panel], data: Mapping[str, Drawn], file: Path) -> None:
    """data: by the panel's title. Rows without panels draw their titles alone."""
    num_lines = max(panel.place[1] + panel.place[3] for panel in panels) + 1
    size = (_COLUMNS * _CELL_INCHES[0], num_lines * _CELL_INCHES[1])
    figure = plt.figure(figsize=size, dpi=96, facecolor="white")
    figure.suptitle(title, x=0.01, y=1 - 0.4 / num_lines, ha="left", fontsize=14, weight="bold")
    for panel in panels:
        x, y, width, height = panel.place
        top = 1 - (y + 1) / num_lines
        if panel.kind == "row":
            figure.text(0.01, top - 0.7 / num_lines, panel.title, fontsize=12, weight="bold", color="0.35")
            continue
        box = (
            (x + 1.1) / _COLUMNS,
            top - (height - 2.3) / num_lines,
            (width - 1.4) / _COLUMNS,
            (height - 3.6) / num_lines,
        )
        axes = figure.add_axes(box)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.tick_params(labelsize=7)
        _draw_panel(axes, panel, data[panel.title])
    figure.savefig(file)
    plt.close(figure)


def _draw_panel(axes: Axes, panel: Panel, drawn: Drawn) -> None:
    if panel.kind == "stat":
        last = next(reversed([value for points in drawn.values() for _, value in points]))
        axes.axis("off")
        axes.text(0.5, 0.5, _readable(last, panel.unit), ha="center", va="center", fontsize=22, color="tab:green")
        return
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=6))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    if panel.kind == "heatmap":
        _draw_heat(axes, drawn)
        return
    if panel.is_stacked:
        times = sorted({time for points in drawn.values() for time, _ in points})
        layers = [[dict(points).get(time, 0.0) for time in times] for points in drawn.values()]
        axes.stackplot([_moment(t) for t in times], np.nan_to_num(np.array(layers)), labels=list(drawn), alpha=0.7)
    else:
        for legend, points in drawn.items():
            axes.plot([_moment(t) for t, _ in points], [value for _, value in points], linewidth=1, label=legend)
        top = max([value for points in drawn.values() for _, value in points if value < np.inf], default=0.0) or 1.0
        axes.set_ylim(-0.03 * top, 1.08 * top)  # a line of zeros is to be seen, too
    axes.yaxis.set_major_formatter(lambda value, _: _readable(value, panel.unit))
    axes.grid(alpha=0.2)
    handles = axes.get_legend_handles_labels()
    shown = [pair for pair in zip(*handles, strict=True) if any(value > 0 for _, value in drawn[pair[1]])]
    named = shown if len(drawn) > _MOST_LEGENDS else list(zip(*handles, strict=True))
    if named:
        axes.legend(
            *zip(*named, strict=True),
            fontsize=7,
            ncols=3,
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.14),
            frameon=False,
            handlelength=1,
        )


def _draw_heat(axes: Axes, drawn: Drawn) -> None:
    """Buckets are cumulative: what is between two bounds is their difference."""
    bounds = sorted(drawn, key=float)
    times = sorted({time for points in drawn.values() for time, _ in points})
    rates = np.array([[dict(drawn[bound]).get(time, 0.0) for time in times] for bound in bounds])
    between = np.diff(np.nan_to_num(rates), axis=0, prepend=0.0)
    used = [row for row in range(len(bounds)) if between[row].max() > 0]
    shown = between[min(used, default=0) : max(used, default=0) + 1]
    axes.imshow(shown, aspect="auto", origin="lower", cmap="YlOrRd")
    axes.set_yticks(range(len(shown)), [f"≤ {float(b):g}" for b in bounds[min(used, default=0) :][: len(shown)]])
    axes.set_xticks([0, len(times) - 1], [f"{_moment(t):%H:%M}" for t in (times[0], times[-1])])


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def _readable(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g}" + {"s": " s", "reqps": "/s", "ops": "/s"}.get(unit, "")
