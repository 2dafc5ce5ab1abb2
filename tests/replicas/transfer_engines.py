"""Two engines' ends of transfers, for tests: pools, threads, fault hooks, and the events that came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from replicas.kv.handoff_actions import (
    Event,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    LossReason,
    ReadReleased,
    SourceOutcome,
    SourceReleased,
)
from replicas.kv.kv_digest import BlockDigester
from replicas.kv.kv_transport import KvTransport
from replicas.kv.transfer_thread import TransferThread
from replicas.messages import Token

# Leases that no pause of the machine outlasts; HURRIED is for tests of their ends.
TIMING = HandoffTiming(60.0, resend_s=0.01, max_resend_s=0.05, remember_s=120.0, quarantine_s=0.05, ask_peers_s=0.05)
HURRIED = replace(TIMING, lease_s=0.4, remember_s=5.0)
SHAPE = (32, 2, 2, 16, 2, 32)
WAIT_S = 120.0


class Faults:
    """Test hooks that a test can turn on and off while the thread runs."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.held: set[str] = set()
        self.asked: list[str] = []
        self.corrupts = False

    def after_read(self, transfer_id: str, local_block_ids: Sequence[int]) -> None:
        if self.corrupts:
            self.pool[local_block_ids[-1]].flatten()[5] += 1

    def after_confirm(self, transfer_id: str, source_block_ids: Sequence[int]) -> None:
        self.pool[list(source_block_ids)] = 0

    def hold(self, point: str) -> bool:
        self.asked.append(point)
        return point in self.held


class Engine:
    """A pool, a transfer thread, and the events it reported."""

    def __init__(
        self,
        make: Callable[[torch.Tensor], KvTransport],
        verify: bool = True,
        timing: HandoffTiming = TIMING,
        max_bytes_in_flight: int = 1 << 30,
        shape: tuple[int, ...] = SHAPE,
    ) -> None:
        self.pool = torch.zeros(shape)
        self.faults = Faults(self.pool)
        self.events: list[Event] = []
        self.changed = threading.Condition()
        self.raises = False
        self._num_turns = 0
        digester = BlockDigester.for_pool(self.pool)
        self.thread = TransferThread(
            lambda: make(self.pool),
            self.on_event,
            timing,
            max_bytes_in_flight,
            (lambda block_ids: digester.digest_blocks(self.pool, block_ids)) if verify else None,
            self.faults,
        )
        self.peer = self.thread.start()

    def on_event(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()
        if self.raises:
            raise RuntimeError("a bug of the engine")

    def await_event(self, kind: type[Event], transfer_id: str) -> Event:
        """Block until the first event of this kind for this transfer."""

        def found() -> Event | None:
            matches = (event for event in self.events if isinstance(event, kind) and event.transfer_id == transfer_id)
            return next(matches, None)

        with self.changed:
            assert self.changed.wait_for(found, WAIT_S), f"no {kind.__name__} in {self.events}"
            event = found()
        assert event is not None
        return event

    def seen(self, transfer_id: str) -> list[str]:
        return [type(event).__name__ for event in self.events if event.transfer_id == transfer_id]

    def await_idle(self) -> None:
        """Until nothing is open, and all that follows from its end has been done: a lease is over before its hooks."""

        def idle() -> bool:
            now = self.thread.snapshot()
            return not (now.leases_open or now.reads_expected or now.reads_in_flight)

        until(idle)
        self.await_turn()

    def await_turn(self) -> None:
        """Until the turn that the thread is in is over: commands are taken before what a turn does."""
        self._num_turns += 1
        nothing = f"turn-{self._num_turns}"
        self.thread.read_into(nothing, (), 0)  # of a transfer that is not: it is answered, and changes nothing
        self.await_event(ReadReleased, nothing)


def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.001)


def deadline_s(after_s: float = WAIT_S) -> float:
    return time.monotonic() + after_s


class Pair:
    """A prefill and a decode engine; every transfer moves blocks 3, 4, 9 into 20, 7, 8."""

    source_ids, reader_ids = (3, 4, 9), (20, 7, 8)

    def __init__(self, source: Engine, reader: Engine) -> None:
        self.source, self.reader = source, reader
        self.kv = torch.zeros(0)

    def expect(self, transfer_id: str, after_s: float = WAIT_S) -> None:
        self.reader.thread.expect(transfer_id, self.source.peer, 40, 3, deadline_s(after_s))

    def offer(self, transfer_id: str) -> None:
        self.kv = torch.randn(len(self.source_ids), *SHAPE[1:])
        self.source.pool[list(self.source_ids)] = self.kv
        first = (Token(transfer_id, 0, 0, 42, None),)
        self.source.thread.offer(transfer_id, self.reader.peer, self.source_ids, 40, first, deadline_s())

    def arrive(self, transfer_id: str) -> HandoffArrived:
        self.expect(transfer_id)
        self.offer(transfer_id)
        event = self.reader.await_event(HandoffArrived, transfer_id)
        assert isinstance(event, HandoffArrived)
        return event

    def read(self, transfer_id: str, num_kept: int = 0) -> None:
        self.arrive(transfer_id)
        self.reader.thread.read_into(transfer_id, self.reader_ids, num_kept)

    def lost(self, transfer_id: str) -> LossReason:
        event = self.reader.await_event(KvLost, transfer_id)
        assert isinstance(event, KvLost)
        return event.reason

    def source_outcome(self, transfer_id: str) -> SourceOutcome:
        event = self.source.await_event(SourceReleased, transfer_id)
        assert isinstance(event, SourceReleased)
        return event.outcome

    def release_holds(self) -> None:
        for engine in (self.source, self.reader):
            engine.faults.held = set()
            engine.faults.corrupts = False
