"""`splitserve deploy`: the Serve config file, which Ray's own schema takes and whose builder makes the application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.command_line import main
from cluster.config_file import config_of, load_for_elsewhere
from cluster.serve_config import serve_config
from cluster.user_error import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(ROOT.glob("configs/*.yaml"))
SCALING = {"kv_capacity_tokens": 4096, "autoscaling": {"min_replicas": 0, "max_replicas": 4}}


def scaling_config(**prefill: Any) -> dict[str, Any]:
    return {"pools": {"prefill": SCALING | prefill, "decode": {"kv_capacity_tokens": 4096, "replicas": 2}}}


def test_prints_what_output_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/local.yaml")
    assert main(["deploy", config]) == 0
    printed = capsys.readouterr().out
    assert main(["deploy", config, "--output", str(tmp_path / "serve.yaml")]) == 0
    assert (tmp_path / "serve.yaml").read_text() == printed
    assert "serve deploy" in capsys.readouterr().out


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_serve_takes_the_file_and_gives_our_builder_the_same_config(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.serve.schema import ServeDeploySchema

    from cluster.serve_app import build

    assert main(["deploy", str(file)]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    schema = ServeDeploySchema.model_validate(document)
    # The schema takes unknown keys too: what it understood must be all that was written.
    assert document.keys() == {"proxy_location", "http_options", "logging_config", "applications"}
    (application,) = schema.applications
    config = load_for_elsewhere(file)[1]
    assert config_of(application.args["config"]) == config
    assert (schema.http_options.host, schema.http_options.port) == (config.server.host, config.server.port)
    assert (application.autoscaling_policy is None) == (file.name != "local-autoscaling.yaml")
    app = build(application.args)
    assert app._bound_deployment.name == "ingress"
    if not config.autoscales:
        assert app._bound_deployment.num_replicas == config.ingress.replicas


def test_a_scaling_pool_brings_the_policy_and_its_bounds() -> None:
    from ray.serve._private.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    from cluster.serve_app import build

    values = scaling_config(autoscaling={"min_replicas": 0, "max_replicas": 3, "initial_replicas": 2})
    document = serve_config(values, config_of(values))
    schema = ServeDeploySchema.model_validate(document)
    (application,) = schema.applications
    assert application.autoscaling_policy is not None
    assert callable(import_attr(application.autoscaling_policy["policy_function"]))
    app = build(application.args)
    ingress = app._bound_deployment
    decode, prefill = (handle._bound_deployment for handle in ingress.init_args[1:])
    assert decode.num_replicas == 2
    assert decode._deployment_config.autoscaling_config is None
    bounds = prefill._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.initial_replicas, bounds.max_replicas) == (0, 2, 3)
    assert (bounds.upscale_delay_s, bounds.downscale_delay_s, bounds.downscale_to_zero_delay_s) == (0, 0, 0)
    reports = ingress._deployment_config.autoscaling_config  # without one, Serve would not ask it for its demand
    assert (reports.min_replicas, reports.max_replicas) == (1, 1)


def test_a_wrong_config_is_refused_with_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(scaling_config(replicas=2, lagg=1)))
    assert main(["deploy", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert 'pools.prefill.lagg: unknown key; did you mean "lag"?' in output.err
    assert "pools.prefill.replicas: 2 is given beside pools.prefill.autoscaling" in output.err


def test_a_relative_path_is_refused_and_an_absolute_one_need_not_be_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(scaling_config() | {"model": {"source": "./llama", "cache_dir": "cache"}}))
    assert main(["deploy", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.cache_dir", "model.source"]
    file.write_text(yaml.safe_dump(scaling_config() | {"model": {"source": "/models/llama"}}))
    assert main(["deploy", str(file)]) == 0


def test_the_builder_refuses_what_is_no_config() -> None:
    from cluster.serve_app import build

    with pytest.raises(ConfigError, match="exactly the key config"):
        build({"config": {}, "cofnig": {}})
    with pytest.raises(ConfigError, match="pools: missing"):
        build({"config": {}})
