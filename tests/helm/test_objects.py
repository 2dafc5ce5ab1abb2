"""Objects beside the RayService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import ALL_VALUES, CHART, render

FULL = ALL_VALUES["full"]


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_the_dashboard_is_open_to_the_operator_only() -> None:
    (policy,) = render().of_kind("NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    doors = [rule for rule in policy["spec"]["ingress"] if any(p["port"] == 8265 for p in rule.get("ports", []))]
    assert [rule["from"][0]["podSelector"]["matchLabels"] for rule in doors] == [
        {"app.kubernetes.io/name": "kuberay-operator"}
    ]
    # Without a port only the cluster's own pods get in.
    for rule in policy["spec"]["ingress"]:
        if "ports" not in rule:
            assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert not [found for found in render().objects if found["kind"] in ("Ingress", "HTTPRoute", "Service")]


def test_prometheus_reaches_what_the_monitors_scrape() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    network = {"httpFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}], "metricsFrom": prometheus}
    for is_scraped in (True, False):
        rendered = render({"networkPolicy": network, "metrics": {"serviceMonitor": {"enabled": is_scraped}}})
        (policy,) = rendered.of_kind("NetworkPolicy")
        (rule,) = [rule for rule in policy["spec"]["ingress"] if rule.get("from") == prometheus]
        assert (8000 in [port["port"] for port in rule["ports"]]) == is_scraped
        assert 8080 in [port["port"] for port in rule["ports"]]


@pytest.mark.parametrize("name", ALL_VALUES)
def test_selectors_select_the_pods(name: str) -> None:
    rendered = render(ALL_VALUES[name])
    labels = {group: template["metadata"]["labels"] for group, template in rendered.pods()}
    for policy in rendered.of_kind("NetworkPolicy") + rendered.of_kind("PodMonitor"):
        selector = policy["spec"].get("podSelector", policy["spec"].get("selector"))["matchLabels"]
        assert all(_selects(selector, found) for found in labels.values())
    for budget in rendered.of_kind("PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        selected = [group for group, found in labels.items() if _selects(selector, found)]
        assert len(selected) == 1
        assert budget["metadata"]["name"].endswith(selected[0])
        # maxUnavailable needs a controller with a scale, which pods of a Ray cluster do not have.
        assert set(budget["spec"]) == {"minAvailable", "selector"}
    for monitor in rendered.of_kind("ServiceMonitor"):
        service_labels = rendered.service["spec"]["serveService"]["metadata"]["labels"]
        assert _selects(monitor["spec"]["selector"]["matchLabels"], service_labels)


def test_the_service_monitor_makes_one_target() -> None:
    """Every pod behind the service must become the same target: nothing that tells them apart may be left."""
    (monitor,) = render(FULL).of_kind("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    address, drop = endpoint["relabelings"]
    assert address == {
        "targetLabel": "__address__",
        "replacement": "llm-server-serve-svc.llm.svc:8000",
    }
    assert set(drop["regex"].split("|")) == {"pod", "node", "container", "endpoint"}
    assert endpoint["honorLabels"] is True


def test_rules_are_those_of_the_folder() -> None:
    (rule,) = render(FULL).of_kind("PrometheusRule")
    groups = FULL["metrics"]["prometheusRule"]["additionalGroups"]
    for path in sorted((CHART / "rules").glob("*.yaml")):
        groups = yaml.safe_load(path.read_text())["groups"] + groups
    assert rule["spec"]["groups"] == groups


def test_dashboards_are_those_of_the_folder() -> None:
    found: dict[str, Any] = {}
    for config_map in render(FULL).of_kind("ConfigMap"):
        if config_map["metadata"].get("namespace") == "monitoring":
            assert config_map["metadata"]["labels"]["grafana"] == "yes"
            found |= config_map["data"]
    files = {path.name: path for path in (CHART / "dashboards").glob("*.json")}
    assert found.keys() == files.keys()
    for name, text in found.items():
        assert text.strip() == files[name].read_text().strip()
        assert len(text) < 1_000_000  # what a config map holds


def test_rules_and_dashboards_with_braces_are_not_templates(tmp_path: Path) -> None:
    """Prometheus and Grafana have templates of their own in those files."""
    import shutil

    chart = tmp_path / "helm"
    shutil.copytree(CHART, chart)
    rule = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }} is {{ $value }}"}}
    (chart / "rules").mkdir(exist_ok=True)
    (chart / "rules" / "zzz.yaml").write_text(yaml.safe_dump({"groups": [{"name": "z", "rules": [rule]}]}))
    (chart / "dashboards").mkdir(exist_ok=True)
    (chart / "dashboards" / "a_b.json").write_text('{"legend": "{{pool}}"}\n')
    rendered = render(FULL, chart)
    (found,) = rendered.of_kind("PrometheusRule")
    assert {"name": "z", "rules": [rule]} in found["spec"]["groups"]
    boards = [m for m in rendered.of_kind("ConfigMap") if m["metadata"]["name"] == "llm-server-a-b"]
    assert boards[0]["data"]["a_b.json"].strip() == '{"legend": "{{pool}}"}'


def test_ingress_and_route_lead_to_the_serve_service() -> None:
    rendered = render(FULL)
    (ingress,), (route,) = rendered.of_kind("Ingress"), rendered.of_kind("HTTPRoute")
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "llm-server-serve-svc", "port": {"name": "serve"}}
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "llm-server-serve-svc", "port": 8000}]
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "20m"}
    multi_host = render(ALL_VALUES["multi-host-rdma"]).of_kind("HTTPRoute")
    assert multi_host[0]["spec"]["rules"][0]["timeouts"] == {"request": "600s"}


def test_the_autoscaler_has_its_role() -> None:
    rendered = render(FULL)
    (role,), (binding,) = rendered.of_kind("Role"), rendered.of_kind("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = rendered.cluster["headGroupSpec"]["template"]["spec"]["serviceAccountName"]
    assert [subject["name"] for subject in binding["subjects"]] == [account] == ["serving"]
    assert not render({"autoscaler": {"enabled": False}}).of_kind("Role")
    given = render({"serviceAccount": {"create": False, "name": "mine"}})
    assert not given.of_kind("ServiceAccount")
    assert given.cluster["headGroupSpec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_extra_objects_are_templates() -> None:
    names = {found["metadata"]["name"] for found in render(FULL).of_kind("ConfigMap")}
    assert {"one", "splitserve-two"} <= names
