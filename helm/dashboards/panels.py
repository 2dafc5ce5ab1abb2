"""The few kinds of panels that the dashboards are made of, and PromQL for what they show."""

from __future__ import annotations

from collections.abc import Mapping

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as styles
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

Panel = timeseries.Panel | stat.Panel | heatmap.Panel

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8
_LETTERS = "ABCDEFGHIJ"


class Source:
    """Which series a dashboard is about, and expressions over them. where: label matchers, without braces."""

    def __init__(self, where: str) -> None:
        self._where = where

    def of(self, metric: str, labels: str = "") -> str:
        """The series of a metric (without its prefix) that also match these labels."""
        return f"splitserve_{metric}{{{self._where}{', ' if labels else ''}{labels}}}"

    def rate(self, metric: str, by: str = "", labels: str = "") -> str:
        """A second, summed. metric: with its suffix, such as requests_total."""
        return f"sum{_by(by)} (rate({self.of(metric, labels)}[$__rate_interval]))"

    def sum(self, metric: str, by: str = "", labels: str = "") -> str:
        return f"sum{_by(by)} ({self.of(metric, labels)})"

    def quantile(self, quantile: float, metric: str, by: str = "", labels: str = "") -> str:
        """Of a histogram."""
        le = f"le, {by}" if by else "le"
        return f"histogram_quantile({quantile}, {self.rate(metric + '_bucket', le, labels)})"

    def mean(self, metric: str, by: str = "", labels: str = "") -> str:
        """Of a histogram. Sum over count, of rates: totals would show the mean since the start."""
        total, count = self.rate(f"{metric}_sum", by, labels), self.rate(f"{metric}_count", by, labels)
        return f"{total} / ({count} > 0)"


def percentiles(source: Source, metric: str) -> dict[str, str]:
    """p50, p95 and p99 of a histogram, as queries by legend."""
    return {f"p{round(q * 100)}": source.quantile(q, metric) for q in (0.5, 0.95, 0.99)}


def lines(
    title: str, unit: str, queries: Mapping[str, str], description: str = "", *, width: int = 8, stacked: bool = False
) -> timeseries.Panel:
    """Over time. queries: legend -> PromQL."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(_HEIGHT)
        .span(width)
        .line_width(1)
        .fill_opacity(60 if stacked else 10)
        .legend(common.VizLegendOptions().show_legend(True).placement(styles.LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(styles.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(styles.StackingMode.NORMAL).group("A"))
    for letter, (legend, expression) in zip(_LETTERS, queries.items(), strict=False):
        panel = panel.with_target(_query(letter, legend, expression))
    return panel


def number(title: str, unit: str, expression: str, description: str = "", *, width: int = 4) -> stat.Panel:
    """One number, as it is now."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(_HEIGHT)
        .span(width)
        .with_target(_query("A", title, expression))
    )


def heat(
    title: str, unit: str, source: Source, metric: str, description: str = "", *, width: int = 12
) -> heatmap.Panel:
    """How a histogram's values spread, over time."""
    query = _query("A", "{{le}}", source.rate(f"{metric}_bucket", "le"))
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(_HEIGHT)
        .span(width)
        .calculate(False)
        .with_target(query.format(prometheus_models.PromQueryFormat.HEATMAP))
    )


def new_dashboard(uid: str, title: str, description: str, tags: list[str]) -> dashboard.Dashboard:
    """With the variables that every dashboard has: datasource, namespace, model_name."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["splitserve", *tags])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("namespace", "Namespace", "label_values(splitserve_build_info, namespace)"))
        .with_variable(
            variable("model_name", "Model", 'label_values(splitserve_build_info{namespace=~"$namespace"}, model_name)')
        )
    )


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """All values by default; ".*" where the label is not there at all, as without Kubernetes."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _query(letter: str, legend: str, expression: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).datasource(DATASOURCE).range()


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
