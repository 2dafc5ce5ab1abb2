"""The committed dashboards are what the generator writes, and ask for nothing that is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.monitoring.metric_table import metric_table
from tests.monitoring.dashboard_file import DASHBOARDS, FOLDER, load, panels_of
from tests.monitoring.promtool import needs_promtool, promtool

ROWS = {row.name: row for row in metric_table()}
FILES = pytest.mark.parametrize("file", DASHBOARDS, ids=[file.stem for file in DASHBOARDS])
_SUFFIXES = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}


def test_there_are_both() -> None:
    assert [file.stem for file in DASHBOARDS] == ["splitserve-overview", "splitserve-replica"]


def test_the_committed_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "generate.py", tmp_path], check=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        file.name: file.read_text() for file in DASHBOARDS
    }, "run: .venv/bin/python helm/dashboards/generate.py"


@FILES
def test_grafana_s_conventions(file: Path) -> None:
    board = load(file)
    assert board["uid"] == file.stem
    assert board["schemaVersion"] >= 39
    assert "__inputs" not in board
    assert file.stat().st_size < 1024**2, "a ConfigMap holds no more"
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names[:3] == ["datasource", "namespace", "model_name"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["type"] in {"row", "timeseries", "stat", "heatmap"}
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        assert bool(letters) is (panel["type"] != "row")


@FILES
def test_panels_lie_side_by_side_and_not_on_each_other(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels_of(load(file)):
        x, y, width, height = panel.place
        cells = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
        assert x + width <= 24, panel.title
        assert not cells & taken, panel.title
        taken |= cells


@FILES
def test_every_series_and_label_is_in_the_table_of_metrics(file: Path) -> None:
    for panel in panels_of(load(file)):
        for query in panel.queries:
            found = re.findall(r"(splitserve_\w+)\{([^}]*)\}", query.expr)
            assert found, query.expr
            allowed = {"namespace", "le"}
            for series, matchers in found:
                row = next(row for name, row in ROWS.items() if series.startswith(name) and _fits(series, name))
                allowed |= {"model_name", "replica", *row.labels}
                for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
                    assert label in {"namespace", "model_name", "replica", *row.labels}, (series, label)
                    known = row.labels.get(label)
                    if known is not None:
                        wanted = value.split("|") if operator == "=~" else [value]
                        assert set(wanted) <= set(known), (series, label, value)
            by = {label for labels in re.findall(r"by \(([^)]*)\)", query.expr) for label in labels.split(", ")}
            assert by | set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= allowed, query.expr


def _fits(series: str, name: str) -> bool:
    return series.removeprefix(name) in _SUFFIXES[ROWS[name].type]


@needs_promtool
def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [query.promql for file in DASHBOARDS for panel in panels_of(load(file)) for query in panel.queries]
    rules = [{"record": f"query_{number}", "expr": promql} for number, promql in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert len(queries) > 70
