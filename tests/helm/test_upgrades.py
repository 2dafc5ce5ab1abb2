"""What makes a new Ray cluster, which needs the GPUs twice, and what does not."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import ALL_VALUES, CHART, Rendered, render


def _decides_the_cluster(rendered: Rendered) -> dict[str, Any]:
    """What the operator (v1.7.0) hashes: all of rayClusterConfig but how many pods there are."""
    cluster = copy.deepcopy(rendered.cluster)
    for group in cluster["workerGroupSpecs"]:
        for key in ("replicas", "minReplicas", "maxReplicas"):
            del group[key]
        group["template"]["spec"].pop("tolerations", None)
    return cluster


@pytest.mark.parametrize("name", ALL_VALUES)
def test_a_new_chart_version_alone_keeps_the_cluster(name: str, tmp_path: Path) -> None:
    newer = tmp_path / "helm"
    shutil.copytree(CHART, newer)
    metadata = yaml.safe_load((newer / "Chart.yaml").read_text())
    metadata |= {"version": "9.9.9", "appVersion": "8.8.8"}
    (newer / "Chart.yaml").write_text(yaml.safe_dump(metadata))
    old, new = render(ALL_VALUES[name]), render(ALL_VALUES[name], newer)
    assert new.service["metadata"]["labels"]["helm.sh/chart"] == "splitserve-9.9.9"
    assert new.service["spec"] == old.service["spec"]


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"routing": {"fallback_to_decode": True}}},
        {"config": {"pools": {"decode": {"max_batch_tokens": 4096}}}},
        {"workers": {"paired": {"maxReplicas": 3, "replicas": 2}}},
        {"workers": {"prefill": {"gpus": 4}}},
        {"networkPolicy": {"enabled": False}, "metrics": {"podMonitor": {"enabled": True}}},
        {"serve": {"serviceLabels": {"a": "b"}}, "commonLabels": {"team": "a"}},
    ],
)
def test_in_place(change: dict[str, Any]) -> None:
    old, new = render(), render(change)
    assert _decides_the_cluster(old) == _decides_the_cluster(new)


@pytest.mark.parametrize("change", [{"image": {"tag": "0.2.0"}}, {"workers": {"paired": {"gpus": 4}}}])
def test_a_new_cluster(change: dict[str, Any]) -> None:
    assert _decides_the_cluster(render()) != _decides_the_cluster(render(change))


@pytest.mark.parametrize(("given", "delay_s"), [("", 160), (0, 0), (900, 900)])
def test_the_old_cluster_stays_until_it_has_drained(given: int | str, delay_s: int) -> None:
    service = render({"upgrade": {"deletionDelaySeconds": given}}).service
    assert service["spec"]["rayClusterDeletionDelaySeconds"] == delay_s


def test_the_image_is_that_of_this_version() -> None:
    from cluster.version import VERSION

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["appVersion"] == values["image"]["tag"] == VERSION
