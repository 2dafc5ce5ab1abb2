"""`splitserve deploy`: the Serve config file, which Ray's own schema takes and whose builder makes the application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.file import config_of, load_for_elsewhere
from cluster.config.parts import OWN_PART_VARIABLE, own_part_here, with_live_part
from cluster.config.root import Config
from cluster.config.service import RayConfig
from cluster.serving.command_line import main
from cluster.serving.replica_settings import IngressSettings, PoolSettings, engine_settings
from cluster.serving.serve_config import config_values, serve_config
from cluster.user_error import ConfigError
from tests.server.redeploy import deployments_of

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

    from cluster.serving.serve_app import build

    assert main(["deploy", str(file)]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    schema = ServeDeploySchema.model_validate(document)
    # The schema takes unknown keys too: what it understood must be all that was written.
    assert document.keys() == {"proxy_location", "http_options", "logging_config", "applications"}
    (application,) = schema.applications
    config = load_for_elsewhere(file)[1]
    assert config_from(document) == config.model_copy(update={"ray": RayConfig()}), "that part is for a local Ray"
    assert (schema.http_options.host, schema.http_options.port) == (config.server.host, config.server.port)
    assert (application.autoscaling_policy is None) == (file.name != "local-autoscaling.yaml")
    app = build(application.args)
    assert app._bound_deployment.name == "ingress"
    named = [deployment.name for deployment in application.deployments]
    assert sorted(named) == sorted(deployment.name for deployment in deployments_of(app))


def test_a_scaling_pool_brings_the_policy_and_its_bounds() -> None:
    from ray.serve._private.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    values = scaling_config(autoscaling={"min_replicas": 0, "max_replicas": 3, "initial_replicas": 2})
    document = serve_config(values, config_of(values))
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.autoscaling_policy is not None
    assert callable(import_attr(application.autoscaling_policy["policy_function"]))
    ingress, prefill, decode = document["applications"][0]["deployments"]
    assert decode["num_replicas"] == 2
    assert "autoscaling_config" not in decode
    bounds = prefill["autoscaling_config"]
    assert [bounds[f"{which}_replicas"] for which in ("min", "initial", "max")] == [0, 2, 3]
    assert {value for key, value in bounds.items() if key.endswith("_delay_s")} == {0}
    reports = ingress["autoscaling_config"]  # without one, Serve would not ask it for its demand
    assert (reports["min_replicas"], reports["max_replicas"]) == (1, 1)


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"pools.decode.max_batch_tokens": 100}, {"decode"}),
        ({"pools.prefill.max_running_sequences": 3}, {"prefill"}),
        ({"pools.decode.num_cpus": 2.0}, {"decode"}),
        ({"pools.decode.replicas": 3}, set()),
        ({"pools.prefill.autoscaling.max_replicas": 7}, set()),
        ({"pools.max_prefill_decode_ratio": 2.0}, set()),
        ({"ingress.replicas": 2}, set()),
        ({"limits.max_choices": 4, "slo.ttft_s": 1.0, "ingress.max_retries": 1}, {"ingress"}),
        ({"model.max_model_len": 512}, {"ingress", "prefill", "decode"}),
        ({"lifecycle.drain_timeout_s": 7.0}, {"ingress", "prefill", "decode"}),
    ],
)
def test_a_change_restarts_what_it_concerns(change: dict[str, Any], restarted: set[str]) -> None:
    """What a deployment is restarted for, by Ray's own rules: its actor options, the application's code version."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeDeploySchema

    def versions(values: dict[str, Any]) -> dict[str, Any]:
        document = serve_config(values, config_of(values))
        (application,) = ServeDeploySchema.model_validate(document).applications
        code = get_app_code_version(application)
        return {of["name"]: (code, of["ray_actor_options"]) for of in document["applications"][0]["deployments"]}

    changed = scaling_config()
    for key, value in change.items():
        *sections, name = key.split(".")
        place = changed
        for section in sections:
            place[section] = place = dict(place.get(section, {}))
        place[name] = value
    assert changed != scaling_config()
    before, after = versions(scaling_config()), versions(changed)
    assert {name for name in before if before[name] != after[name]} == restarted


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
    from cluster.serving.serve_app import build

    with pytest.raises(ConfigError, match="exactly the key config"):
        build({"config": {}, "cofnig": {}})
    with pytest.raises(ConfigError, match=r'kv\.blocksize: unknown key; did you mean "block_size"'):
        build({"config": {"kv": {"blocksize": 16}}})


def test_a_replica_puts_its_settings_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replicas are told by way of the file is what `splitserve serve` tells them."""
    values = yaml.safe_load((ROOT / "configs/local-2p2d.yaml").read_text())
    config = config_of(values)
    (application,) = serve_config(values, config)["applications"]
    shared = application["args"]["config"]
    for deployment in application["deployments"]:
        (variable,) = deployment["ray_actor_options"]["runtime_env"]["env_vars"].items()
        monkeypatch.setenv(*variable)
        name = deployment["name"]
        if name == "ingress":
            told = IngressSettings(shared)().model_dump()
            whole = config_of(with_live_part(shared | own_part_here(), deployment["user_config"]))
            assert whole == config.model_copy(update={"ray": RayConfig()})
            for section in told.keys() - {"ingress"}:
                assert told[section] == config.model_dump()[section]
        else:
            assert PoolSettings(name, shared)() == engine_settings(name, config.pools.deployed()[name], config)


def test_a_replica_says_what_is_wrong_with_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_PART_VARIABLE, '{"lagg": 1}')
    with pytest.raises(ConfigError, match=r'pools\.decode\.lagg: unknown key; did you mean "lag"'):
        PoolSettings("decode", {})()
    monkeypatch.delenv(OWN_PART_VARIABLE)
    with pytest.raises(ConfigError, match="splitserve deploy"):
        IngressSettings({})()


def config_from(document: dict[str, Any]) -> Config:
    """The config that the deployments of a Serve config have together."""
    values = config_values(document)
    assert values is not None
    return config_of(values)


def test_check_reads_what_deploy_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the chart's users have it: the Serve config of a rendered RayService."""
    values = scaling_config()
    made = tmp_path / "serve.yaml"
    made.write_text(yaml.safe_dump(serve_config(values, config_of(values))))
    assert main(["check", str(made)]) == 0
    assert capsys.readouterr().out.endswith("ok\n")
    made.write_text(made.read_text().replace("kv_capacity_tokens: 4096", "kv_capacity_tokens: 4097"))
    assert main(["check", str(made)]) == 2
    assert "pools.decode.kv_capacity_tokens" in capsys.readouterr().err
    made.write_text("applications: [{name: other}]")
    assert main(["check", str(made)]) == 2
    assert "applications: unknown key" in capsys.readouterr().err
