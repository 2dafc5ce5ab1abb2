"""`make soak`: a server of 2 prefill and 2 decode replicas at 70 % load, with a random verified fault every 30 s.

One client in twenty leaves early, one in a hundred means harm. At the end nothing may be wrong or hang, nothing may be
held, and nothing may have grown.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cluster.load.machine import describe_machine, machine_line
from tests.chaos.asked import all_asked
from tests.chaos.golden_load import golden_load, learn_undisturbed
from tests.chaos.growth import Growth
from tests.chaos.judge import Judge
from tests.chaos.open_load import OpenLoad
from tests.chaos.row_run import counts, wait_for_baseline
from tests.chaos.rows import ROWS, Row
from tests.chaos.served import chaos_server
from tests.server.processes import is_ready
from tests.server.running_server import RunningServer

_LOAD = 0.7  # of what the server does when each of its clients asks as soon as it has its answer
_MEASURE_S = 45.0
_SAMPLE_S = 10.0
_PATIENCE_S = 240.0
_MOST_TOLD = 20
# After a process that held connections has gone, until everybody knows; and until its successor is there.
_KNOWN_AFTER_S = 15.0
_UNLIKE = ("nothing", "roll", "to", "both", "GCS", "slow", "MB/s")  # rows that are no moment's fault


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault of a soak. back_s: when all was as before."""

    row: Row
    at_s: float
    back_s: float
    evidence: str


@dataclass(slots=True)
class Faults:
    """Injects one after another, the next when all is as before, every_s apart at least."""

    server: RunningServer
    every_s: float
    rng: random.Random
    happened: list[Happened] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        before = counts(self.server)
        rows = [row for row in ROWS.values() if not any(word in row.name.split() for word in _UNLIKE)]
        while not self._stopping.wait(self.every_s):
            row = self.rng.choice(rows)
            assert row.fault is not None
            try:
                injected = row.fault(self.server)
            except AssertionError as error:
                self.broken.append(f"{row.name}: {error}")
                continue
            deadline_s = time.monotonic() + _PATIENCE_S
            while not (counts(self.server) == before and is_ready(self.server)):
                if time.monotonic() > deadline_s:
                    self.broken.append(f"{row.name}: not as before after {_PATIENCE_S:.0f} s")
                    return
                time.sleep(0.5)
            self.happened.append(Happened(row, injected.at_s, time.monotonic(), injected.evidence))
            took_s = self.happened[-1].back_s - injected.at_s
            print(
                f"  {len(self.happened)}. {row.name}: {injected.evidence}; as before after {took_s:.1f} s", flush=True
            )

    def stop(self) -> None:
        self._stopping.set()

    def during(self, began_s: float, ended_s: float) -> list[Row]:
        """What clients may have noticed of a request that was open from then to then."""
        return [
            event.row for event in self.happened if began_s < event.back_s + _KNOWN_AFTER_S and ended_s > event.at_s
        ]

    def allow(self, error: str, began_s: float, ended_s: float) -> bool:
        """Whether a client may see that of a request that was open from then to then."""
        return any(error.startswith(row.may_see or ("\0",)) for row in self.during(began_s, ended_s))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument(
        "--rate", type=float, default=None, help="requests a second, instead of 70 %% of what is measured"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed: the same requests and faults")
    parser.add_argument("--proxy", default="serve", choices=("serve", "haproxy"), help="who takes connections")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        print("starting 2 ingress, 2 prefill and 2 decode replicas", flush=True)
        with chaos_server(Path(folder), options.proxy) as server:
            broken = _soak(server, options)
    print("\n".join(broken) or "all promises were kept")
    return 1 if broken else 0


def _soak(server: RunningServer, options: argparse.Namespace) -> list[str]:
    """Promises that were not kept. Prints what there is to know."""
    asked = all_asked()
    judge = Judge(learn_undisturbed(server.url, asked))
    rate = options.rate or _LOAD * _measured_rate(server)
    print(f"{machine_line(describe_machine())}\n{rate:.2f} requests a second for {options.minutes:g} min", flush=True)
    whole = counts(server)
    load = OpenLoad(server.url, asked, rate, options.seed)
    faults = Faults(server, options.every, random.Random(options.seed))
    growth = Growth()
    threads = [threading.Thread(target=target.run, daemon=True) for target in (load, faults)]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 60.0 * options.minutes
    while time.monotonic() < end_s:
        time.sleep(_SAMPLE_S)
        growth.add(server)
    faults.stop()
    threads[1].join(2 * _PATIENCE_S)
    load.stop()
    threads[0].join(2 * _PATIENCE_S)
    hangs = sum(thread.is_alive() for thread in threads)
    return _report(load, faults, growth, judge, wait_for_baseline(server), whole, hangs)


def _measured_rate(server: RunningServer) -> float:
    """Requests a second when 32 clients ask without a pause."""
    began_s = time.monotonic()
    with golden_load(server.url, all_asked()) as load:
        time.sleep(_MEASURE_S)
        load.stop()
    return len(load.streams) / (time.monotonic() - began_s)


def _report(
    load: OpenLoad,
    faults: Faults,
    growth: Growth,
    judge: Judge,
    held: dict[str, float],
    whole: dict[str, int],
    num_threads_left: int,
) -> list[str]:
    verdicts = [(stream, judge.verdict(stream)) for stream in load.streams]
    failed = [(str(s.error), s.began_s, s.ended_s, s.asked.name) for s in load.streams if s.error]
    failed += [(r.error, r.at_s, r.ended_s, r.kind) for r in load.refusals if r.error]
    unexpected = [failure for failure in failed if not faults.allow(*failure[:3])]
    not_promised = Counter(error for error, *_ in unexpected)
    lines, grown = growth.lines(whole)
    print(f"{len(faults.happened)} faults: {dict(Counter(event.row.name for event in faults.happened))}")
    print(f"requests: {dict(load.num_sent)}; texts: {dict(Counter(verdict for _, verdict in verdicts))}")
    print(f"failed as is promised and not: {dict(Counter(error for error, *_ in failed))}, {dict(not_promised)}")
    for error, began_s, ended_s, name in unexpected[:_MOST_TOLD]:
        rows = ", ".join(row.name for row in faults.during(began_s, ended_s))
        span = f"{began_s - load.began_s:.0f} to {ended_s - load.began_s:.0f} s"
        print(f"  {error}: {name}, {span}, beside {rows or 'no fault'}")
    print(f"held at the end: {held or 'nothing'}")
    print("\n".join(f"  {line}" for line in lines))
    num_hung = num_threads_left + sum(stream.hangs for stream in load.streams)
    return [
        *faults.broken,
        *(f"{num} x {error}" for error, num in not_promised.items()),
        *(f"wrong text: {stream.asked.name}" for stream, verdict in verdicts if verdict == "wrong"),
        *([f"{num_hung} hung"] if num_hung else []),
        *([f"held: {held}"] if held else []),
        *(f"grew: {line}" for line in grown),
    ]


if __name__ == "__main__":
    # So that the server ends with it, as at an interrupt: what a shell starts in the background hears of none.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
