"""What the chart renders is accepted: by Helm, Kubernetes of every version, the RayService CRD, the operator."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import schema_contents

from tests.helm.chart import ALL_VALUES, CHART, ROOT, render
from tests.helm.operator_rules import violations
from tests.helm.prune_crd import SCHEMA, pruned

KUBERNETES = [f"1.{minor}" for minor in range(28, 38)]
# The fullest values against every version, all values against the oldest and the newest.
CASES = [("full", version) for version in KUBERNETES]
CASES += [(name, version) for name in ALL_VALUES if name != "full" for version in (KUBERNETES[0], KUBERNETES[-1])]
CUSTOM = {"RayService", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"}
SHARED_CRD = ROOT.parent / "shared" / "kuberay" / "ray.io_rayservices.yaml"


@pytest.mark.parametrize("name", ALL_VALUES)
def test_lints(name: str) -> None:
    report = helm_python.lint(CHART, ALL_VALUES[name], strict=True, namespace="llm")
    findings = [message for message in report["messages"] if message["severity"] >= 2]
    assert not findings
    assert not report["errors"]


@pytest.fixture(autouse=True, scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kubernetes_validate.utils.schema_contents", cache(schema_contents))
        yield


@pytest.mark.parametrize(("name", "version"), CASES)
def test_kubernetes_accepts_objects_and_pods(name: str, version: str) -> None:
    rendered = render(ALL_VALUES[name])
    for found in rendered.objects:
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, version, strict=True)
    for group, template in rendered.pods():
        metadata = {"name": group, **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_kubernetes_schemas_catch_an_unknown_field() -> None:
    (policy,) = render().of_kind("NetworkPolicy")
    policy["spec"]["podSelectr"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(policy, "1.28", strict=True)


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_crd_accepts_the_ray_service(name: str) -> None:
    jsonschema.validate(render(ALL_VALUES[name]).service, json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "rayVersoin"), "2.60.0"),
        (("spec", "rayClusterConfig", "enableInTreeAutoscaling"), "yes"),
        (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v3"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_the_crd_catches_mistakes(path: tuple[str, ...], value: Any) -> None:
    service = render().service
    place = service
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, json.loads(SCHEMA.read_text()))


@pytest.mark.skipif(not SHARED_CRD.exists(), reason="the CRD itself is not on this machine; its copy is used")
def test_the_copy_of_the_crd_is_current() -> None:
    crd = yaml.load(SHARED_CRD.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert json.loads(SCHEMA.read_text()) == pruned(crd)


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_operator_accepts_the_ray_service(name: str) -> None:
    assert violations(render(ALL_VALUES[name]).service) == []


@cache
def _broken() -> dict[str, dict[str, Any]]:
    """One RayService for each rule, which breaks it."""
    good = render(ALL_VALUES["full"]).service

    def change(*path: Any, value: Any) -> dict[str, Any]:
        service = copy.deepcopy(good)
        place: Any = service
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        return service

    cluster = ("spec", "rayClusterConfig")
    worker = (*cluster, "workerGroupSpecs", 0)
    head = (*cluster, "headGroupSpec")
    options = ("spec", "upgradeStrategy", "clusterUpgradeOptions")
    env = [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]
    return {
        "47 characters": change("metadata", "name", value="a" * 48),
        "DNS-1035": change("metadata", "name", value="1a"),
        "none of": change("spec", "upgradeStrategy", "type", value="Rolling"),
        "DeletionDelay": change("spec", "rayClusterDeletionDelaySeconds", value=-1),
        "needs the autoscaler": change(*cluster, "enableInTreeAutoscaling", value=False),
        "more than maxSurge": change(*options, "stepSizePercent", value=60),
        "intervalSeconds": change(*options, "intervalSeconds", value=0),
        "gatewayClassName": change(*options, "gatewayClassName", value=""),
        "headService": change(*head, "headService", value={"metadata": {"name": "mine"}}),
        "no container": change(*worker, "template", "spec", "containers", value=[]),
        "not in rayStartParams": change(*worker, "rayStartParams", "labels", value="a=b"),
        "both in rayStartParams": change(*head, "resources", value={"CPU": "1"}),
        "is no label": change(*worker, "labels", value={"a b": "c"}),
        "is no range": change(*worker, "minReplicas", value=9),
        "must be Never": change(*worker, "template", "spec", "restartPolicy", value="Always"),
        "beside gcsFault": change(*head, "template", "spec", "containers", 0, "env", value=env),
        "2.52.0": change(*cluster, "rayVersion", value="2.51.1"),
    }


@pytest.mark.parametrize("sentence", _broken())
def test_each_operator_rule_is_able_to_fail(sentence: str) -> None:
    assert any(sentence in found for found in violations(_broken()[sentence]))


def test_packages_with_schema_rules_and_dashboards(tmp_path: Path) -> None:
    """What .helmignore leaves out is not enforced or rendered: production-stack's chart lost its schema that way."""
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    with helm_python.Chart.load(archive) as chart:
        packed = {entry["name"] for entry in chart.files}
        with pytest.raises(helm_python.HelmValuesError, match="imge"):
            chart.render({"imge": {}}, name="a")
    wanted = {
        str(path.relative_to(CHART)) for kind in ("rules/*.yaml", "dashboards/*.json") for path in CHART.glob(kind)
    }
    assert wanted <= packed
    assert not [name for name in packed if name.endswith(".py")]
