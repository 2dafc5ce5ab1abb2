"""Where the server listens, and whether anybody can: Ray would say only that its proxy did not start."""

from __future__ import annotations

import errno
import socket
import time

from cluster.user_error import UserError

_POLL_S = 0.2


def base_url(host: str, port: int) -> str:
    """An IPv6 address stands in brackets there (RFC 3986, 3.2.2)."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_elsewhere(host: str, port: int, serves_host: str | None, serves_port: int) -> bool:
    """Whether Serve listens at another address than the config says: of one that runs, a new file changes none."""
    return (serves_host or "0.0.0.0", serves_port) != (host, port)


def check_address(host: str, port: int, patience_s: float) -> None:
    """Blocks, at most for patience_s, while the port is taken: a server that was killed leaves it a moment later.

    Raises UserError.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind(address)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise UserError(_why_not(host, port, error)) from error
        time.sleep(_POLL_S)


def _why_not(host: str, port: int, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return f"server.port: {port} on {host} is taken by another program; server.port or --port chooses another"
    if error.errno == errno.EACCES:
        return f"server.port: {port} on {host}: {reason}; ports below 1024 usually need root"
    return f"server.host: {host} is no address of this machine: {reason}"
