"""The processes of a server: which there are, what they do, what they hold, and the end of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from cluster.serving.child_processes import descendants
from tests.server.running_server import ROOT, RunningServer

# How the titles of Ray's processes begin.
CONTROLLER = "ray::ServeController"
PROXY = "ray::ProxyActor"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def replicas(server: RunningServer, pool: str) -> list[int]:
    """Process ids of a pool's replicas."""
    return processes(server, f"ray::ServeReplica:splitserve:{pool}")


def processes(server: RunningServer, title_start: str) -> list[int]:
    """Process ids of the server's processes whose title begins so."""
    return sorted(pid for pid in own_processes(server) if title(pid).startswith(title_start))


def own_processes(server: RunningServer) -> list[int]:
    """All of them, the command's own first."""
    return [server.process.pid, *descendants(server.process.pid)]


def the_one(server: RunningServer, title_start: str) -> int:
    """The only process with such a title; fails the test when there are none or several."""
    (pid,) = processes(server, title_start)
    return pid


def the_program(server: RunningServer, name: str) -> int:
    """The only process that runs a program of this file name."""
    (pid,) = programs(server, name)
    return pid


def programs(server: RunningServer, name: str) -> list[int]:
    """Process ids of the server's processes that run a program of this file name."""
    return sorted(pid for pid in own_processes(server) if Path(title(pid).split(" ")[0]).name == name)


def ray_address(server: RunningServer) -> str:
    """Where the server's own Ray is reached."""
    (raylet,) = programs(server, "raylet")
    return next(word for word in title(raylet).split() if word.startswith("--gcs-address=")).partition("=")[2]


def redeploy(server: RunningServer, *changes: str) -> None:
    """Blocks until it has been asked for. changes: options of tests/server/redeploy.py."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    config = server.log_file.parent / "config.yaml"
    command = [sys.executable, "-m", "tests.server.redeploy", ray_address(server), str(config), *changes]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=120, capture_output=True)


def kill(pid: int) -> None:
    """SIGKILL. Returns when the process has gone; fails the test when it does not go."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state_of(pid) in ("", "Z"), 120.0)


def stat(pid: int) -> list[str]:
    """Fields of proc(5)'s stat from the state on; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def state_of(pid: int) -> str:
    """ "R", "S", "T" for stopped, "Z" for dead and not yet waited for; "" when it has ended."""
    return (stat(pid) or [""])[0]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_ticks(pid: int) -> int:
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def rss_bytes(pid: int) -> int:
    """Memory that it holds now, what it shares included; 0 when it has ended."""
    fields = stat(pid)
    return int(fields[21]) * _PAGE_BYTES if fields else 0


def is_ready(server: RunningServer) -> bool:
    """Whether the server can be reached, and says that it is ready."""
    try:
        return httpx.get(f"{server.url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when it holds; fail the test when that takes longer."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.2)
