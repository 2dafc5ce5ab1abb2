"""What a server's processes hold over time, by role: memory, descriptors, threads; and how many metric series."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.server.processes import own_processes, rss_bytes, stat, title
from tests.server.running_server import RunningServer

_NUM_THREADS = 17  # field of proc(5)'s stat, from the state on
_ROLES = {
    "ray::ServeReplica:splitserve:ingress": "ingress",
    "ray::ServeReplica:splitserve:prefill": "prefill",
    "ray::ServeReplica:splitserve:decode": "decode",
    "ray::ServeController": "controller",
    "ray::Proxy": "proxy",
    "ray::": "Ray's own",
}
# What may be more at the end: allocators keep what they had once, and replicas of another age have another size.
_SHARE = 0.15
_NOISE = {"MiB": 48.0, "files": 24.0, "threads": 12.0, "series": 60.0}


@dataclass(frozen=True, slots=True)
class Held:
    """Of all processes of a role together; of `/metrics`, only series."""

    role: str
    num: int
    amounts: dict[str, float]


@dataclass(slots=True)
class Growth:
    """Samples of a run. Those in which something was missing, as after a fault, are not compared."""

    samples: list[tuple[float, dict[str, Held]]] = field(default_factory=list)

    def add(self, server: RunningServer) -> None:
        """Blocks for as long as /metrics takes."""
        found: dict[str, list[int]] = {}
        for pid in own_processes(server):
            found.setdefault(_role(pid, server), []).append(pid)
        held = {role: Held(role, len(pids), _sum(pids)) for role, pids in found.items()}
        if (num := _num_series(server)) is not None:
            held["/metrics"] = Held("/metrics", 1, {"series": num})
        self.samples.append((time.monotonic(), held))

    def lines(self, counts: dict[str, int]) -> tuple[list[str], list[str]]:
        """What each role held at the begin and at the end, and what grew. counts: how many of each are all."""
        lines, grown = [], []
        for role in sorted({role for _, held in self.samples for role in held}):
            whole = [held[role] for _, held in self.samples if role in held]
            whole = [held for held in whole if held.num == counts.get(role, held.num)]
            if len(whole) < 4:
                grown.append(f"{role}: hardly ever all were there")
                continue
            quarter = max(2, len(whole) // 4)
            for what in whole[0].amounts:
                first, last = _median(whole[:quarter], what), _median(whole[-quarter:], what)
                lines.append(f"{role}: {first:.0f} -> {last:.0f} {what}")
                if last - first > max(_NOISE[what], _SHARE * first):
                    grown.append(lines[-1])
        return lines, grown


def _role(pid: int, server: RunningServer) -> str:
    if pid == server.process.pid:
        return "command"
    name = title(pid)
    return next((role for start, role in _ROLES.items() if name.startswith(start)), "others")


def _sum(pids: Sequence[int]) -> dict[str, float]:
    return {
        "MiB": sum(rss_bytes(pid) for pid in pids) / 2**20,
        "files": float(sum(_num_files(pid) for pid in pids)),
        "threads": float(sum(int((stat(pid) or ["0"] * 40)[_NUM_THREADS]) for pid in pids)),
    }


def _num_files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def _num_series(server: RunningServer) -> float | None:
    try:
        text = httpx.get(f"{server.url}/metrics", timeout=120).text
    except httpx.TransportError:
        return None
    return float(sum(1 for line in text.splitlines() if line and line[0] != "#"))


def _median(held: Sequence[Held], what: str) -> float:
    return statistics.median(of.amounts[what] for of in held)
