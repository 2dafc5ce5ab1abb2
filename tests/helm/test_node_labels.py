"""Replicas go to the nodes that the config names by label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster.config.root import Config
from cluster.serving.app import build_app
from cluster.serving.command_line import main
from tests.helm.chart import ALL_VALUES, render

ROOT = Path(__file__).parents[2]
CONFIG = render(ALL_VALUES["multi-host-rdma"]).config


def _options(config: Config) -> dict[str, dict[str, Any]]:
    """Ray actor options by deployment."""
    ingress = build_app(config)._bound_deployment
    pools = [argument._bound_deployment for argument in ingress.init_args if hasattr(argument, "_bound_deployment")]
    return {deployment.name: deployment.ray_actor_options for deployment in (ingress, *pools)}


def test_labels_become_selectors() -> None:
    options = _options(Config.model_validate(CONFIG))
    assert options.keys() == {"ingress", "prefill", "decode"}
    for name, found in options.items():
        assert found["label_selector"] == {"splitserve.io/pool": name}


def test_without_labels_a_replica_goes_anywhere() -> None:
    for found in _options(Config.model_validate(render().config)).values():
        assert not found.get("label_selector")


@pytest.mark.parametrize(
    "labels", [{"a b": "c"}, {"a": "in(b,c)"}, {"a": "!b"}, {"/a": "b"}, {"a": "b" * 64}, {"a": ""}]
)
def test_operators_and_nonsense_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="is no label"):
        Config.model_validate(CONFIG | {"ingress": {"node_labels": labels}})


def test_splitserve_serve_refuses_labels_that_its_ray_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    local = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    local["ingress"]["node_labels"] = CONFIG["ingress"]["node_labels"]
    file.write_text(yaml.safe_dump(local))
    assert main(["check", str(file)]) == 0
    assert main(["serve", str(file)]) == 1
    assert "ingress.node_labels" in capsys.readouterr().err
