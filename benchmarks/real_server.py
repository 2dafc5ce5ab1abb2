"""`splitserve serve` in a process of its own, for as long as a benchmark needs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

_ROOT = Path(__file__).parents[1]
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
# The server's last line when it is ready begins so.
_READY = b"  curl "
_PORTS = range(20_000, 30_000)
_PORTS_APART = 31  # of two processes whose ids follow each other


class ServerFailed(Exception):
    """It ended, or was not ready in time; its log is in the text."""


@contextmanager
def real_server(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """Write the config and the log into folder, serve on a free port, yield the URL. Blocks for a minute. Raises
    ServerFailed."""
    path, log = folder / "config.yaml", folder / "server.log"
    config = {**config, "logging": {"file": str(folder / "replicas.log"), **config.get("logging", {})}}
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [sys.executable, "-m", "cluster.serving.command_line", "serve", str(path), "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            cwd=_ROOT,
        )
    try:
        _wait_until_ready(process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while _READY not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ServerFailed(log.read_text(errors="replace")[-3000:])
        time.sleep(0.2)


def free_port() -> int:
    """As `free_ports`, one."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As many different ones, that nobody else on this machine is given meanwhile: it may be a minute until a server
    listens there. All that one process needs at once are to be asked for at once: vLLM listens where another does.

    Not of those that the kernel, Ray and Serve give away, which begin at 32,768, 10,002 and 30,000. Two benchmarks
    side by side begin their search at different ones. Raises OSError when too many are taken.
    """
    found: list[int] = []
    for place in range(len(_PORTS)):
        if len(found) == count:
            return found
        port = _PORTS[(_PORTS_APART * os.getpid() + place) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    raise OSError(f"{count} free ports were wanted between {_PORTS.start} and {_PORTS.stop}: {len(found)} are there")
