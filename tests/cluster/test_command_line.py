"""The command `splitserve`: exit codes, what it prints, and that a wrong config stops it before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cluster.config.root import Config
from cluster.serving import package_roots
from cluster.serving.command_line import main
from cluster.user_error import UserError
from cluster.version import VERSION

ROOT = Path(__file__).parents[2]
LOCAL = str(ROOT / "configs/local.yaml")
COLOCATED = str(ROOT / "configs/colocated.yaml")


def serve_with(monkeypatch: pytest.MonkeyPatch, run_server: Callable[[Config], int]) -> None:
    """Puts a function in the place of the server."""
    module = types.ModuleType("cluster.serving.serve_command")
    module.run_server = run_server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.serving.serve_command", module)


@pytest.fixture
def bad_config(tmp_path: Path) -> str:
    file = tmp_path / "bad.yaml"
    file.write_text("pools:\n  prefill: {kv_capacity_tokens: 4096}\n  decode: {kv_capacity_tokens: 4096, replica: 2}\n")
    return str(file)


def test_check_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", LOCAL]) == 0
    output = capsys.readouterr().out
    assert output.endswith("\nok\n")
    for part in (
        "SmolLM2-135M-Instruct",
        "http://127.0.0.1:8000",
        "1 replica on cpu, 1 thread each",
        "8192 tokens in 512 blocks of 16 (4 requests of full length)",
        "16384 tokens in 1024 blocks of 16 (8 requests of full length)",
        "UCX",
    ):
        assert part in output


def test_check_of_colocated_names_one_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", COLOCATED]) == 0
    output = capsys.readouterr().out
    assert "\ndecode " in output
    assert "\nprefill " not in output
    assert "\ntransfer " not in output


def test_serve_gives_the_config_with_host_and_port_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Config] = []

    def run_server(config: Config) -> int:
        served.append(config)
        return 7

    serve_with(monkeypatch, run_server)
    assert main(["serve", LOCAL, "--host", "::1", "--port", "8123"]) == 7
    assert [(config.server.host, config.server.port) for config in served] == [("::1", 8123)]


def test_wrong_config_stops_serve_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad_config: str
) -> None:
    serve_with(monkeypatch, lambda config: pytest.fail("the server was started"))
    assert main(["serve", bad_config]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f'{bad_config}: pools.decode.replica: unknown key; did you mean "replicas"? (line 3)\n'


def test_wrong_port_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", LOCAL, "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("command line: server.port: 0 is too small")


def test_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_server(config: Config) -> int:
        raise UserError("port 8000 is in use")

    serve_with(monkeypatch, run_server)
    assert main(["serve", LOCAL]) == 1
    assert capsys.readouterr().err == "port 8000 is in use\n"


def test_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_server(config: Config) -> int:
        raise KeyboardInterrupt

    serve_with(monkeypatch, run_server)
    assert main(["serve", LOCAL]) == 130


def test_serve_refuses_a_foreign_package_of_our_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str) -> ModuleSpec:
        folder = "/elsewhere" if name == "scheduler" else str(ROOT)
        return ModuleSpec(name, None, origin=f"{folder}/{name}/__init__.py")

    monkeypatch.setattr(package_roots, "find_spec", find_spec)
    serve_with(monkeypatch, lambda config: pytest.fail("the server was started"))
    assert main(["serve", LOCAL]) == 1
    assert "scheduler in /elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["srve", LOCAL], ["serve", LOCAL, "--decode", "many"], ["serve", LOCAL, "--port", "x"]],
    ids=lambda words: " ".join(words),
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: splitserve" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"splitserve {VERSION}\n"


def test_module_runs_as_a_command(bad_config: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cluster.serving.command_line", "check", bad_config]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
