"""The load of a soak: requests come whatever became of those before; some clients leave, some mean harm."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.refusals.bodies import Kind, small_kinds
from benchmarks.refusals.exchange import exchange
from tests.chaos.asked import Asked
from tests.chaos.chaos_client import HANGS_AFTER_S, Stream, read_stream

LEAVE = 0.05
HOSTILE = 0.01
_MOST_AT_ONCE = 128  # clients; who finds no place is counted, not sent
_LEAVES_BEFORE = 30  # events


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a hostile request got: error says what was not as it should be. at_s: when it was sent."""

    kind: str
    at_s: float
    ended_s: float
    error: str | None


@dataclass(slots=True)
class OpenLoad:
    """rate: requests a second. The same seed asks for the same things at the same times. began_s: when."""

    url: str
    all_asked: Sequence[Asked]
    rate: float
    seed: int
    streams: list[Stream] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    num_sent: Counter[str] = field(default_factory=Counter)
    began_s: float = field(default_factory=time.monotonic)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until it is told to stop; then all that is open ends. Fails when something never does."""
        rng, hostile = random.Random(self.seed), small_kinds()
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            open_: list[Future[None]] = []
            next_s = time.monotonic()
            while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
                next_s += rng.expovariate(self.rate)
                open_ = [future for future in open_ if not future.done()]
                kind, asked, salt = rng.random(), rng.choice(self.all_asked), f"soak {rng.random()}"
                if len(open_) >= _MOST_AT_ONCE:
                    self.num_sent["no place"] += 1
                elif kind < HOSTILE:
                    self.num_sent["hostile"] += 1
                    open_.append(pool.submit(self._harm, rng.choice(hostile)))
                else:
                    leaves_after = rng.randint(1, _LEAVES_BEFORE) if kind < HOSTILE + LEAVE else None
                    self.num_sent["whole" if leaves_after is None else "leaving"] += 1
                    open_.append(pool.submit(self._ask, asked, salt if rng.random() < 0.7 else None, leaves_after))
            deadline_s = time.monotonic() + 2 * HANGS_AFTER_S
            for future in open_:
                future.result(max(0.0, deadline_s - time.monotonic()))

    def stop(self) -> None:
        self._stopping.set()

    def _ask(self, asked: Asked, salt: str | None, leaves_after: int | None) -> None:
        self.streams.append(read_stream(self.url, asked, salt, leaves_after))

    def _harm(self, kind: Kind) -> None:
        at_s, error = time.monotonic(), None
        try:
            status, _ = exchange(self.url, kind)
            error = None if status == kind.status else f"status {status}"
        except TimeoutError:
            error = "no answer"
        except OSError as broken:
            error = "connection refused" if isinstance(broken, ConnectionRefusedError) else "connection cut"
        self.refusals.append(Refusal(kind.name, at_s, time.monotonic(), error))
