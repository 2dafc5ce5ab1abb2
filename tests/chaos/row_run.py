"""One row: the load, the fault in the midst of it, until all is as before, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from tests.chaos.asked import Asked
from tests.chaos.chaos_client import Stream
from tests.chaos.faults import POOLS, victims
from tests.chaos.golden_load import GoldenLoad, golden_load
from tests.chaos.judge import Judge
from tests.chaos.rows import Row
from tests.server.processes import is_ready, replicas, state_of
from tests.server.running_server import RunningServer

PATIENCE_S = 300.0
_SETTLE_S = 3.0  # what is noticed late, such as a lost connection, is noticed by then
_LEASE_S = 30.0  # for what a dead reader held, and a machine that has other things to do
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """recovery_s: from the fault until every process was there again and ready. pause_s: the longest within a stream,
    of those that were open at the fault or after. held: what is not at its baseline at the end, in KV and requests."""

    row: Row
    evidence: str
    num_streams: int
    num_open: int  # at the fault
    seen: Counter[str]  # errors, as clients saw them
    verdicts: Counter[str]
    num_hung: int
    recovery_s: float
    pause_s: float
    first_token_s: float
    held: dict[str, float]
    wrong: list[str]

    @property
    def num_failed(self) -> int:
        return sum(self.seen.values())

    @property
    def broken(self) -> list[str]:
        """Promises that were not kept."""
        not_promised = {error: n for error, n in self.seen.items() if not error.startswith(self.row.may_see or ("\0",))}
        found = [f"{n} x {error}" for error, n in not_promised.items()]
        found += [f"wrong text: {name}" for name in self.wrong]
        found += [f"held: {self.held}"] if self.held else []
        return found


def run_row(server: RunningServer, row: Row, all_asked: Sequence[Asked], judge: Judge, say: Say) -> Outcome:
    """Blocks for a minute or so. Fails when the fault did not happen, or things don't get as they were."""
    before = counts(server)
    with golden_load(server.url, all_asked) as load:
        _wait(lambda: len(load.whole_since(0.0)) >= len(all_asked) // 4, "the load to begin")
        say(f"{len(load.open)} streams are open")
        at_s, evidence = time.monotonic(), "-"
        if row.fault is not None:
            injected = row.fault(server)
            at_s, evidence = injected.at_s, injected.evidence
            say(f"fault: {evidence}")
        _wait(lambda: counts(server) == before and is_ready(server), "the server to be as before")
        recovery_s = time.monotonic() - at_s
        say(f"as before after {recovery_s:.1f} s")
        there_s = time.monotonic()
        _wait(lambda: len(load.whole_since(there_s)) >= len(all_asked) // 2, "new streams")
        time.sleep(_SETTLE_S)
        load.stop()
    say(f"{len(load.streams)} streams have ended")
    return _outcome(row, evidence, load, at_s, recovery_s, wait_for_baseline(server), judge)


def counts(server: RunningServer) -> dict[str, int]:
    """How many there are that serve: processes of each pool that are known to /metrics, controller and proxy."""
    try:
        samples = server.metrics()
    except (httpx.HTTPError, ValueError):
        return {}
    known: dict[str, set[str]] = {pool: set() for pool in POOLS}
    for name, labels, _ in samples:
        if name == "splitserve_build_info":
            known[labels["pool"]].add(labels["replica"])
    found = {pool: min(len(known[pool]), len(_awake(replicas(server, pool)))) for pool in POOLS}
    return found | {name: len(_awake(victims(server, name))) for name in ("controller", "proxy")}


def _awake(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if state_of(pid) not in ("", "T", "Z")]


def wait_for_baseline(server: RunningServer) -> dict[str, float]:
    """What is still held when all leases are over; empty: nothing."""
    deadline_s = time.monotonic() + _LEASE_S
    while True:
        try:
            held = server.held()
        except (httpx.HTTPError, AssertionError) as error:
            held = {f"/metrics: {error}": 1.0}
        if not held or time.monotonic() > deadline_s:
            return held
        time.sleep(0.5)


def _wait(is_done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.2)


def _outcome(
    row: Row,
    evidence: str,
    load: GoldenLoad,
    at_s: float,
    recovery_s: float,
    held: dict[str, float],
    judge: Judge,
) -> Outcome:
    after = [stream for stream in load.streams if stream.ended_s > at_s]
    verdicts = [(stream, judge.verdict(stream)) for stream in load.streams]
    return Outcome(
        row,
        evidence,
        len(load.streams),
        len(load.during(at_s)),
        Counter(stream.error for stream in load.streams if stream.error is not None),
        Counter(verdict for _, verdict in verdicts),
        sum(stream.hangs for stream in load.streams),
        recovery_s,
        max((stream.longest_pause_s for stream in after), default=0.0),
        max((_first_token_s(stream) for stream in after), default=0.0),
        held,
        [stream.asked.name for stream, verdict in verdicts if verdict == "wrong"],
    )


def _first_token_s(stream: Stream) -> float:
    return 0.0 if stream.first_s is None else stream.first_s - stream.began_s
