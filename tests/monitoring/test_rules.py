"""Recording and alerting rules: valid, tested, and each alert explained to whoever it wakes."""

from __future__ import annotations

import re
from typing import Any

import yaml

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.metric_table import metric_table
from cluster.monitoring.metrics_merge import merge
from replicas.metrics.pool_metrics import PoolMetrics
from tests.monitoring.dashboard_file import ROOT
from tests.monitoring.promtool import needs_promtool, promtool

RULES = ROOT / "helm" / "rules" / "splitserve.rules.yaml"
TESTS = ROOT / "tests" / "monitoring" / "splitserve.rules_test.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))
    # The config that docs/runbook.md offers finds them.
    assert f"{len(rules())} rules found" in promtool("check", "config", str(ROOT / "docs" / "prometheus.yaml"))


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_every_alert_is_tested() -> None:
    tested = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test.get("alert_rule_test", ())]
    firing = {case["alertname"] for case in tested if case["exp_alerts"]}
    assert firing == alerts().keys()


@needs_promtool
def test_prometheus_accepts_the_metrics() -> None:
    """Its linter of names, types and help, on what all kinds of processes expose."""
    snapshots = {"ingress": IngressMetrics("model", "1", "2").snapshot()}
    snapshots |= {p: PoolMetrics("model", p, "1", "2", "cpu", "ucx").snapshot() for p in ("prefill", "decode")}
    assert promtool("check", "metrics", stdin=merge(snapshots)) == ""


def test_rules_ask_for_metrics_that_are_there() -> None:
    names = {row.name for row in metric_table()}
    known = names | {f"{name}{end}" for name in names for end in ("_total", "_sum", "_count", "_bucket")}
    for rule in rules():
        assert set(re.findall(r"\bsplitserve_\w+", rule["expr"])) <= known
        recorded = {other["record"] for other in rules() if "record" in other}
        assert set(re.findall(r"\bsplitserve:[\w:]+", rule["expr"])) <= recorded


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE)
    for name, rule in alerts().items():
        assert name in headings
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert [heading for heading in headings if heading.startswith("SplitServe")] == list(alerts())


def test_every_section_says_what_it_means_and_what_to_do() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        if section.startswith("SplitServe"):
            assert "**Means**" in section, section[:40]
            assert "**Do**" in section, section[:40]
