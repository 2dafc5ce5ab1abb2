"""From what is typed to a config: models, config files, and what `--print-config` writes."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import load_config
from cluster.config.root import Config
from cluster.launch import start
from cluster.launch.machine import Gpu, Machine
from cluster.launch.start import Start, Typed, plan_start
from cluster.serving import command_line
from cluster.serving.command_line import main
from cluster.user_error import ConfigError
from tests.cluster.test_wrong_starts import LLAMA, model

ROOT = Path(__file__).parents[2]
LOCAL = str(ROOT / "configs/local.yaml")
GB = 10**9
LAPTOP = Machine(2, 24 * GB, 20 * GB)
CARDS = Machine(16, 128 * GB, 120 * GB, (Gpu("NVIDIA H200", 150 * GB, (9, 0)),) * 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    for name, content in model(LLAMA).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What the server, which is not started, was given. The machine is a small one."""
    configs: list[Config] = []
    module = types.ModuleType("cluster.serving.serve_command")
    module.run_server = lambda config: configs.append(config) or 0  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "cluster.serving.serve_command", module)
    monkeypatch.setattr(command_line, "look_at_machine", lambda environment: LAPTOP)
    monkeypatch.setattr(start, "check_address", lambda *_: None)
    return configs


def plan(what: str | None, machine: Machine = LAPTOP, **typed: Any) -> Start:
    values: dict[str, Any] = {"prefill": None, "decode": None, "settings": {}, **typed}
    return plan_start(Typed(what, **values), machine)


def test_without_a_word_the_model_that_comes_with_splitserve_is_served(
    served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve"]) == 0
    assert served == [load_config(LOCAL)]
    shown = capsys.readouterr().err
    assert [line.split()[0] for line in shown.splitlines()[:5]] == ["model", "device", "layout", "KV", "memory"]
    assert "SmolLM2-135M-Instruct (bundled)" in shown
    assert "--print-config" in shown


def test_a_folder_is_served_under_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for what in ("./tiny", "tiny", "tiny/", str(folder)):
        config = plan(what).config
        assert (config.model.source, config.model.name) == (str(folder), "tiny")
        assert config.model.max_model_len == 512


def test_a_pool_too_small_for_usual_requests_is_enough_for_a_model_of_short_ones(folder: Path) -> None:
    config = plan(str(folder), settings={"pools.decode.kv_capacity_tokens": 1024}).config
    assert (config.model.max_model_len, config.pools.decode.kv_capacity_tokens) == (512, 1024)


def test_a_folder_goes_before_a_model_of_the_hub_of_that_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    planned = plan("org/tiny")
    assert (planned.config.model.source, planned.hub) == (str(folder), None)
    assert str(folder) in planned.chosen


def test_a_config_file_is_served_as_it_is(tmp_path: Path) -> None:
    planned = plan(LOCAL)
    assert (planned.config, planned.chosen) == (load_config(LOCAL), "")
    without_ending = tmp_path / "config"
    without_ending.write_text("layout: colocated\npools: {decode: {kv_capacity_tokens: 4096}}\n")
    assert plan(str(without_ending)).config.layout == "colocated"


def test_what_is_typed_beside_a_config_file_counts(tmp_path: Path) -> None:
    settings = {"model.max_model_len": 1024, "pools.decode.autoscaling.max_replicas": 2}
    file = tmp_path / "scaling.yaml"
    file.write_text(
        "pools: {prefill: {kv_capacity_tokens: 4096}, decode: {autoscaling: null, kv_capacity_tokens: 4096}}"
    )
    config = plan(str(file), prefill=2, settings=settings).config
    assert config.model.max_model_len == 1024
    assert config.pools.decode.most_replicas == 2, "a section that was null becomes one"
    assert config.pools.prefill is not None
    assert config.pools.prefill.replicas == 2


def test_a_wrong_setting_is_told_from_a_wrong_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        "server: {prot: 1}\npools: {prefill: {kv_capacity_tokens: 4096}, decode: {kv_capacity_tokens: 4096}}"
    )
    with pytest.raises(ConfigError) as raised:
        plan(str(file), settings={"model.dtype": "fp8", "slo.ttft_s": "soon"})
    assert sorted(line.split(": ")[0] for line in raised.value.lines) == [str(file), "command line", "command line"]


PRINTED: dict[str, tuple[Machine, list[str]]] = {
    "nothing": (LAPTOP, []),
    "no prefill": (LAPTOP, ["--prefill", "0"]),
    "an address": (LAPTOP, ["--host", "::1", "--port", "8123"]),
    "settings": (LAPTOP, ["--set", "model.max_model_len=1000", "--set", "cors.allow_origins=['*']",
                          "--set", "pools.decode.admission={output_length: quantile}", "--set", "slo.e2e_s=30"]),
    "a relative path": (LAPTOP, ["--set", "auth.api_keys_file=keys.txt", "--set", "model.cache_dir=./cache"]),
    "a folder": (LAPTOP, ["{}"]),
    "a name": (LAPTOP, ["{}", "--set", "model.name=mine"]),
    "a config": (LAPTOP, [LOCAL, "--set", "server.port=1234"]),
    "cards": (CARDS, []),
    "cards, more prefill": (CARDS, ["{}", "--decode", "1", "--set", "pools.prefill.kv_memory_fraction=0.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_config_serves_the_same_wherever_it_lies(
    name: str,
    folder: Path,
    tmp_path: Path,
    served: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine, words = PRINTED[name]
    words = [word.replace("{}", str(folder)) for word in words]
    monkeypatch.setattr(command_line, "look_at_machine", lambda environment: machine)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text("secret")
    assert main(["serve", *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert served == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "printed.yaml").write_text(printed)
    assert main(["serve", *words]) == 0
    assert main(["serve", str(elsewhere / "printed.yaml")]) == 0
    first, second = served
    assert first == second
    assert json.loads(first.model_dump_json()) == json.loads(second.model_dump_json())
    assert all(line.startswith("#") for line in printed.splitlines()[:2])


def test_check_takes_what_serve_takes(folder: Path, served: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [str(folder)], [LOCAL], [str(folder), "--prefill", "0", "--set", "server.port=81"]):
        assert main(["check", *words]) == 0
        output = capsys.readouterr().out
        assert output.endswith("of it free now\nok\n")
        assert "\nmemory    weights " in output
    assert served == []


def test_a_whole_section_may_be_set(served: list[Config]) -> None:
    """What is chosen for its other keys stays."""
    section = "pools.decode={max_running_sequences: 16, admission: {output_length: quantile}}"
    assert main(["serve", "--set", section, "--set", "pools.decode.lag=0"]) == 0
    decode = served[0].pools.decode
    assert (decode.max_running_sequences, decode.admission.output_length) == (16, "quantile")
    assert (decode.kv_capacity_tokens, decode.num_threads) == (16384, 1)


def test_warnings_are_told_and_do_not_stop_a_start(served: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", LOCAL, "--set", "pools.decode.num_threads=8"]) == 0
    assert capsys.readouterr().err.startswith(
        "warning: pools.prefill.num_threads and pools.decode.num_threads: 9 threads"
    )
    assert len(served) == 1


def test_check_of_a_serve_config_does_not_look_at_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is for another one, which may well have GPUs."""
    file = tmp_path / "serve.yaml"
    assert main(["deploy", str(ROOT / "configs/gpu-1p1d.yaml"), "--output", str(file)]) == 0
    monkeypatch.setattr(command_line, "look_at_machine", lambda environment: pytest.fail("it was looked at"))
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.endswith("\nok\n")
