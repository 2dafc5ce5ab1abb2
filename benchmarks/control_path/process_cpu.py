"""CPU time of this process's descendants by what they are, from /proc; empty where there is none."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# In this order: what a command line contains, and what it is called here.
_KINDS = (
    (":ingress", "ingress"),
    (":decode", "decode"),
    (":prefill", "prefill"),
    ("HAProxyManager", "haproxy manager"),
    ("haproxy", "haproxy"),
    ("ProxyActor", "proxy"),
    ("ServeController", "controller"),
    ("raylet", "raylet"),
    ("gcs_server", "gcs"),
)


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    cpu_s: float
    command: str


def cpu_by_kind() -> dict[str, float]:
    """Seconds so far."""
    seconds: dict[str, float] = defaultdict(float)
    for process in _descendants():
        seconds[_kind(process.command)] += process.cpu_s
    return dict(seconds)


def cpu_of(part: str) -> float:
    """Seconds so far of those whose command line contains this."""
    return sum(process.cpu_s for process in _descendants() if part in process.command)


def _descendants() -> Iterator[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    waiting = [os.getpid()]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            yield process
            waiting.append(process.pid)


def _kind(command: str) -> str:
    return next((name for part, name in _KINDS if part in command), "other")


def _processes() -> Iterator[_Process]:
    for folder in _PROC.glob("[0-9]*"):
        try:
            fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        yield _Process(int(folder.name), int(fields[1]), cpu_s, command)
