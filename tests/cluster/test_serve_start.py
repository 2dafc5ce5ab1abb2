"""What `splitserve serve` says before it starts Ray, where Ray could say less."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from cluster import serve_command
from cluster.configuration.config import Config
from cluster.user_error import UserError

POOLS = {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}


def config(**server: object) -> Config:
    return Config.model_validate({"server": server, "pools": POOLS})


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(serve_command, "_serve", lambda _: 0)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_a_port_that_is_taken_is_named(proxy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"server\.port: can't listen on 127\.0\.0\.1 port {port}: Address already"
        ):
            serve_command.run_server(config(port=port, proxy=proxy))
    assert serve_command.run_server(config(port=port, proxy=proxy)) == 0


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(UserError, match=r"can't listen on 192\.0\.2\.1 port 8000"):
        serve_command.run_server(config(host="192.0.2.1"))


def test_the_config_decides_about_the_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    serve_command.run_server(config(port=_free_port()))
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "set server.proxy: haproxy in the config" in capsys.readouterr().err
    serve_command.run_server(config(port=_free_port(), proxy="haproxy"))
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert capsys.readouterr().err == ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
