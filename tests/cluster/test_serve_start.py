"""What `splitserve serve` says before it starts Ray, where Ray could say less."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.config.root import Config
from cluster.http import server_address
from cluster.serving import serve_command
from cluster.serving.ready_lines import ready_lines
from cluster.terminal.log_file import LogFile
from cluster.user_error import UserError
from tests.server.local_ray import free_port

POOLS = {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}


def config(**server: object) -> Config:
    return Config.model_validate({"server": server, "pools": POOLS})


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(serve_command, "_log_file", lambda _: LogFile(tmp_path / "serve.log"))
    monkeypatch.setattr(serve_command, "_serve", lambda *_: 0)
    monkeypatch.setattr(serve_command, "_PORT_PATIENCE_S", 2.0)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_a_port_that_is_taken_is_named(proxy: str) -> None:
    port = free_port()  # not one of the system's: somebody else who connects could be given it when it comes free
    taken = rf"server\.port: {port} on 127\.0\.0\.1 is taken"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match=taken):
        serve_command.run_server(config(port=port, proxy=proxy))
    assert serve_command.run_server(config(port=port, proxy=proxy)) == 0


def test_a_port_that_comes_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "_PORT_PATIENCE_S", 60.0)
    port = free_port()
    other = socket.create_server(("127.0.0.1", port))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(serve_command.run_server, config(port=port))
        time.sleep(0.5)
        assert not run.done()
        other.close()
        assert run.result(60) == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    with pytest.raises(UserError, match=rf"server\.host: {host} is no address of this machine: "):
        serve_command.run_server(config(host=host))


def test_the_config_decides_about_the_proxy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    serve_command.run_server(config(port=free_port()))
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "set server.proxy: haproxy in the config" in capfd.readouterr().err
    serve_command.run_server(config(port=free_port(), proxy="haproxy"))
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert capfd.readouterr().err == f"splitserve: log of Ray and replicas: {tmp_path / 'serve.log'}\n"


def test_a_url_has_an_ipv6_address_in_brackets() -> None:
    for host, url in {
        "::1": "http://[::1]:9203",
        "127.0.0.1": "http://127.0.0.1:9203",
        "a.b": "http://a.b:9203",
    }.items():
        lines = ready_lines(config(host=host, port=9203), {"decode": [], "prefill": []})
        assert f"URL        {url}/v1\n" in lines
        assert f"curl {url}/v1/chat/completions" in lines


@pytest.mark.parametrize(
    ("serves", "is_elsewhere"),
    [(("0.0.0.0", 8000), False), ((None, 8000), False), (("0.0.0.0", 8001), True), (("127.0.0.1", 8000), True)],
)
def test_a_serve_that_listens_elsewhere_is_found(serves: tuple[str | None, int], is_elsewhere: bool) -> None:
    """No host means every address, as in Serve's own schema."""
    assert server_address.is_elsewhere("0.0.0.0", 8000, *serves) is is_elsewhere


def test_serve_looks_after_its_proxy_every_two_seconds_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
    monkeypatch.delenv(name, raising=False)
    serve_command.run_server(config(port=free_port()))
    assert os.environ[name] == "2"
    monkeypatch.setenv(name, "5")
    serve_command.run_server(config(port=free_port()))
    assert os.environ[name] == "5"


def test_a_ray_that_runs_elsewhere_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    serve_command.run_server(config(port=free_port()))
    assert "RAY_ADDRESS" not in os.environ
    assert "RAY_ADDRESS is not heeded: serve starts a Ray of its own; for a cluster: splitserve deploy" in (
        capfd.readouterr().err
    )
