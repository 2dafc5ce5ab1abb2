"""Faults of a server's own processes, by pid, each verified: that it happened, and that it lasted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.server.processes import (
    CONTROLLER,
    PROXY,
    cpu_ticks,
    kill,
    processes,
    programs,
    redeploy,
    replicas,
    state_of,
    wait_until,
)
from tests.server.running_server import RunningServer

POOLS = ("ingress", "prefill", "decode")
_SEEN_WITHIN_S = 15.0  # a signal takes effect at once, where its process gets to run
_LEAVES_WITHIN_S = 150.0
_ROLLS_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that has happened. at_s: when; evidence: how it is known."""

    at_s: float
    evidence: str


Fault = Callable[[RunningServer], Injected]


def victims(server: RunningServer, name: str) -> list[int]:
    """Process ids of what a fault is of: a pool, `controller`, `proxy`, `gcs`, `raylet`. The busiest one first."""
    if name in POOLS:
        return _busiest_first(replicas(server, name))
    if name == "proxy":
        return processes(server, PROXY) or programs(server, "haproxy")
    if name == "controller":
        return processes(server, CONTROLLER)
    return programs(server, {"gcs": "gcs_server", "raylet": "raylet"}[name])


def _busiest_first(pids: Sequence[int]) -> list[int]:
    before = {pid: cpu_ticks(pid) for pid in pids}
    time.sleep(0.3)
    return sorted(pids, key=lambda pid: before[pid] - cpu_ticks(pid))


def killed(name: str, num: int = 1) -> Fault:
    """SIGKILL of so many of them, the busiest ones."""

    def inject(server: RunningServer) -> Injected:
        pids = victims(server, name)[:num]
        assert len(pids) == num, f"there are only {len(pids)} processes of {name}"
        at_s = time.monotonic()
        for pid in pids:
            kill(pid)
        return Injected(at_s, f"pid {_listed(pids)} gone")

    return inject


def frozen(name: str, for_s: float, num: int = 1) -> Fault:
    """SIGSTOP of so many, and SIGCONT after a while. One that is ended meanwhile stays gone: that is said."""

    def inject(server: RunningServer) -> Injected:
        pids = victims(server, name)[:num]
        assert len(pids) == num, f"there are only {len(pids)} processes of {name}"
        at_s = time.monotonic()
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: all(state_of(pid) == "T" for pid in pids), _SEEN_WITHIN_S)
            ticks = {pid: cpu_ticks(pid) for pid in pids}
            time.sleep(for_s)
            still = [pid for pid in pids if state_of(pid) == "T" and cpu_ticks(pid) == ticks[pid]]
            ended = [pid for pid in pids if state_of(pid) in ("", "Z")]
            assert sorted([*still, *ended]) == sorted(pids), f"not all of {_listed(pids)} stood still"
        finally:
            for pid in pids:
                if state_of(pid) == "T":
                    os.kill(pid, signal.SIGCONT)
        wait_until(lambda: all(state_of(pid) != "T" for pid in pids), _SEEN_WITHIN_S)
        return Injected(at_s, f"pid {_listed(pids)} in state T for {for_s:g} s" + (", then ended" if ended else ""))

    return inject


def terminated(name: str) -> Fault:
    """SIGTERM of one; returns when it has gone."""

    def inject(server: RunningServer) -> Injected:
        pid = victims(server, name)[0]
        at_s = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: state_of(pid) in ("", "Z"), _LEAVES_WITHIN_S)
        return Injected(at_s, f"pid {pid} gone after {time.monotonic() - at_s:.1f} s")

    return inject


def rolled(*pools: str) -> Fault:
    """A rolling update of these pools at once; returns when no process of before is left."""

    def inject(server: RunningServer) -> Injected:
        old = {pid for pool in pools for pid in replicas(server, pool)}
        at_s = time.monotonic()
        redeploy(server, *(word for pool in pools for word in ("--roll", pool)))
        wait_until(lambda: not old & {pid for pool in pools for pid in replicas(server, pool)}, _ROLLS_WITHIN_S)
        return Injected(at_s, f"pid {_listed(sorted(old))} gone after {time.monotonic() - at_s:.0f} s")

    return inject


def scaled(pool: str, num: int) -> Fault:
    """To so many and back; returns when the surplus has left, and the way back is asked for."""

    def inject(server: RunningServer) -> Injected:
        before = len(replicas(server, pool))
        at_s = time.monotonic()
        redeploy(server, "--scale", f"{pool}={num}")
        wait_until(lambda: len(replicas(server, pool)) == num, _ROLLS_WITHIN_S)
        took_s = time.monotonic() - at_s
        redeploy(server, "--scale", f"{pool}={before}")
        return Injected(at_s, f"{before} to {num} processes after {took_s:.0f} s")

    return inject


def pointed(name: str, text: str = "", for_s: float = 0.0) -> Fault:
    """One of the faults in replicas/fault_points.py, by its file; returns when a replica says that it did it."""

    def inject(server: RunningServer) -> Injected:
        did, asks = server.fault_dir / f"did.{name}", server.fault_dir / name
        did.unlink(missing_ok=True)
        at_s = time.monotonic()
        asks.write_text(text)
        try:
            wait_until(did.exists, 60.0)
            time.sleep(for_s)
        finally:
            asks.unlink(missing_ok=True)
        return Injected(at_s, f"a replica wrote {did.name}")

    return inject


def both(first: Fault, second: Fault) -> Fault:
    """One right after the other."""

    def inject(server: RunningServer) -> Injected:
        one, other = first(server), second(server)
        return Injected(one.at_s, f"{one.evidence}; {other.evidence}")

    return inject


def _listed(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))
