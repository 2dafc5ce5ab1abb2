"""The Serve config inside the RayService: Ray accepts it, and it runs the SplitServe config of the values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.config.root import Config
from cluster.serving.serve_config import serve_config
from helm.config_schema import as_text, with_config
from tests.helm.chart import ALL_VALUES, ROOT, merged, read_values, render
from tests.helm.chart import CHART as CHART_FOLDER

DEFAULTS = read_values(CHART_FOLDER / "values.yaml")


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_config_is_that_of_the_values(name: str) -> None:
    """Nothing is added, renamed or rounded on the way, large numbers among them."""
    wanted = _without_nulls(merged(DEFAULTS["config"], ALL_VALUES[name].get("config", {})))
    assert render(ALL_VALUES[name]).config == wanted


@pytest.mark.parametrize("name", ALL_VALUES)
def test_splitserve_check_accepts_the_config(name: str) -> None:
    config = render(ALL_VALUES[name]).config
    Config.model_validate(config)


@pytest.mark.parametrize("name", ALL_VALUES)
def test_ray_accepts_it(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    document = render(ALL_VALUES[name]).serve_config
    schema = ServeDeploySchema.model_validate(document)
    assert [application.name for application in schema.applications] == ["splitserve"]


@pytest.mark.parametrize("name", ALL_VALUES)
def test_equals_what_splitserve_deploy_makes(name: str) -> None:
    rendered = render(ALL_VALUES[name])
    assert rendered.serve_config == serve_config(rendered.config, Config.model_validate(rendered.config))


@pytest.mark.parametrize("name", ALL_VALUES)
def test_its_form(name: str) -> None:
    document = render(ALL_VALUES[name]).serve_config
    (application,) = document.pop("applications")
    assert document == {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "logging_config": {"encoding": "JSON", "log_level": "WARNING", "enable_access_log": False},
    }
    policy = application.pop("autoscaling_policy", None)
    scales = "autoscaling_config" in str(application["deployments"])
    assert policy == ({"policy_function": "cluster.autoscaling.autoscaling_policy:decide"} if scales else None)
    del application["args"]
    del application["deployments"]  # see test_equals_what_splitserve_deploy_makes
    assert application == {"name": "splitserve", "route_prefix": "/", "import_path": "cluster.serving.serve_app:build"}


def test_the_chart_knows_the_config_as_it_is() -> None:
    """Its schema has every key, type and bound, so Helm refuses what `splitserve check` would."""
    text = (CHART_FOLDER / "values.schema.json").read_text()
    assert text == as_text(with_config(json.loads(text))), "run: python helm/config_schema.py"


def test_every_key_of_the_config_passes_the_chart() -> None:
    """All of configs/local.yaml, where its values do not speak of one machine."""
    whole = read_values(ROOT / "configs/local.yaml")
    whole["server"]["host"], whole["ingress"]["channel_host"] = "0.0.0.0", "auto"
    for pool in ("prefill", "decode"):
        whole["pools"][pool]["kv_memory_fraction"] = None  # the chart's default, which goes with no other size
    deployed = render({"config": whole, "workers": {"paired": {"gpus": 0}}}).config
    del whole["ray"]  # of the Ray that `splitserve serve` starts
    assert _without_nulls(deployed) == _without_nulls(merged(DEFAULTS["config"], whole))
    Config.model_validate(deployed)
