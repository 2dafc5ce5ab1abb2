"""helm/README.md describes helm/values.yaml as it is, every value of it."""

from __future__ import annotations

from typing import Any

import yaml

from helm.values_table import described_keys, with_table
from tests.helm.chart import CHART


def test_the_table_is_current() -> None:
    readme, values = (CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()
    assert readme == with_table(readme, values), "run: python helm/values_table.py"


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text()
    described = {row.key for row in described_keys(text)}

    def missing(values: Any, path: str) -> list[str]:
        if path in described and (path in whole or not isinstance(values, dict) or not values):
            return []
        if not isinstance(values, dict) or not values:
            return [path]
        return [key for name, value in values.items() for key in missing(value, f"{path}.{name}" if path else name)]

    # Maps that are one value: what is in them is Kubernetes', the config's, or described with workers.paired.
    whole = {"config", "workers.prefill", "workers.decode", "workers.ingress", "head.resources", "autoscaler.resources"}
    whole |= {"workers.paired.resources", "networkPolicy.operatorPodLabels", "grafana.dashboards.labels"}
    assert missing(yaml.safe_load(text), "") == []
