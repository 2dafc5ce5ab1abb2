"""Whole engines' ends of transfers: real threads over real NIXL, and over the fake where a fault must be exact."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from replicas.fake_transport import FakeNetwork, FakeTransport, NetworkFaults, ReadFate
from replicas.handoff_actions import (
    CommandRefused,
    Event,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LossReason,
    ReadReleased,
    SourceOutcome,
    SourceReleased,
)
from replicas.kv_digest import BlockDigester
from replicas.kv_transport import KvTransport
from replicas.messages import FirstToken, TransferPeer
from replicas.nixl_transport import NixlTransport
from replicas.transfer_thread import TransferThread

TIMING = HandoffTiming(lease_s=0.4, resend_s=0.01, max_resend_s=0.05, remember_s=5.0, quarantine_s=0.05)
SHAPE = (32, 2, 2, 16, 2, 32)
WAIT_S = 10.0


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

    def __init__(self, make: Callable[[torch.Tensor], KvTransport], verify: bool = True) -> None:
        self.pool = torch.zeros(SHAPE)
        self.faults = Faults(self.pool)
        self.events: list[Event] = []
        self.changed = threading.Condition()
        self.raises = False
        digester = BlockDigester.for_pool(self.pool)
        self.thread = TransferThread(
            lambda: make(self.pool),
            self.on_event,
            TIMING,
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
        def idle() -> bool:
            now = self.thread.snapshot()
            return not (now.leases_open or now.reads_expected or now.reads_in_flight)

        until(idle)


def until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + WAIT_S
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
        first = (FirstToken(0, 42, None),)
        self.source.thread.offer(transfer_id, self.reader.peer, self.source_ids, 40, first, deadline_s())

    def arrive(self, transfer_id: str) -> HandoffArrived:
        self.expect(transfer_id)
        self.offer(transfer_id)
        event = self.reader.await_event(HandoffArrived, transfer_id)
        assert isinstance(event, HandoffArrived)
        return event

    def read(self, transfer_id: str) -> None:
        self.arrive(transfer_id)
        self.reader.thread.read_into(transfer_id, self.reader_ids)

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


@pytest.fixture(scope="module")
def nixl_pair() -> Iterator[Pair]:
    source = Engine(lambda pool: NixlTransport(pool, "prefill-0", "s1", "f"))
    reader = Engine(lambda pool: NixlTransport(pool, "decode-0", "r1", "f"))
    yield Pair(source, reader)
    assert reader.thread.stop()
    assert source.thread.stop()


@pytest.fixture
def pair(nixl_pair: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The shared pair; a test leaves it without anything open, or fails."""
    yield nixl_pair
    nixl_pair.release_holds()
    nixl_pair.reader.await_idle()
    nixl_pair.source.await_idle()
    assert nixl_pair.reader.thread.is_alive()
    assert nixl_pair.source.thread.is_alive()


def test_happy_path_delivers_the_kv_before_the_source_reuses_its_blocks(pair: Pair) -> None:
    before = pair.reader.thread.snapshot()
    arrived = pair.arrive("happy")
    assert arrived.handoff.first_tokens == (FirstToken(0, 42, None),)
    assert arrived.handoff.digest is not None
    pair.reader.thread.read_into("happy", pair.reader_ids)
    pair.reader.await_event(KvReady, "happy")
    assert pair.source_outcome("happy") is SourceOutcome.CONFIRMED
    assert torch.equal(pair.reader.pool[list(pair.reader_ids)], pair.kv)
    assert not pair.source.pool[list(pair.source_ids)].any()  # after_confirm
    assert pair.reader.seen("happy") == ["HandoffArrived", "ReadReleased", "KvReady"]
    after = pair.reader.thread.snapshot()
    assert after.results["ready"] == before.results.get("ready", 0) + 1
    assert after.bytes_read - before.bytes_read == 3 * pair.reader.peer.block_bytes
    assert after.read_s > before.read_s


def test_corrupted_block_is_lost(pair: Pair) -> None:
    pair.reader.faults.corrupts = True
    pair.read("corrupt")
    assert pair.lost("corrupt") is LossReason.DIGEST_MISMATCH
    assert pair.reader.seen("corrupt") == ["HandoffArrived", "ReadReleased", "KvLost"]


def test_source_blocks_that_change_after_the_offer_are_noticed(pair: Pair) -> None:
    pair.arrive("changed")
    pair.source.pool[4, 0, 0, 0, 0, 0] += 1
    pair.reader.thread.read_into("changed", pair.reader_ids)
    assert pair.lost("changed") is LossReason.DIGEST_MISMATCH


def test_cancel_while_waiting_for_the_handoff(pair: Pair) -> None:
    pair.expect("c-wait")
    pair.reader.thread.cancel("c-wait")
    assert pair.lost("c-wait") is LossReason.CANCELLED
    pair.offer("c-wait")  # the drop came first, or the handoff is answered by one
    assert pair.source_outcome("c-wait") is SourceOutcome.DROPPED


def test_cancel_while_waiting_for_memory(pair: Pair) -> None:
    pair.arrive("c-memory")
    pair.reader.thread.cancel("c-memory")
    assert pair.lost("c-memory") is LossReason.CANCELLED
    assert pair.source_outcome("c-memory") is SourceOutcome.DROPPED
    pair.reader.thread.read_into("c-memory", pair.reader_ids)  # the engine did not know yet
    pair.reader.await_event(ReadReleased, "c-memory")


def test_cancel_during_the_read_releases_the_blocks_only_at_its_end(pair: Pair) -> None:
    pair.reader.faults.held = {"end_read"}
    pair.read("c-read")
    until(lambda: pair.reader.thread.snapshot().reads_in_flight == 1)
    pair.reader.thread.cancel("c-read")
    assert pair.lost("c-read") is LossReason.CANCELLED
    assert pair.source_outcome("c-read") is SourceOutcome.DROPPED
    until(lambda: pair.reader.thread.snapshot().reads_quarantined == 1)
    assert "ReadReleased" not in pair.reader.seen("c-read")
    pair.reader.faults.held = set()
    pair.reader.await_event(ReadReleased, "c-read")
    assert pair.reader.seen("c-read") == ["HandoffArrived", "KvLost", "ReadReleased"]
    assert pair.reader.thread.snapshot().reads_quarantined == 0


def test_cancel_while_waiting_for_the_confirmation(pair: Pair) -> None:
    pair.source.faults.held = {"send_confirm"}
    pair.read("c-confirm")
    pair.reader.await_event(ReadReleased, "c-confirm")
    assert pair.source_outcome("c-confirm") is SourceOutcome.CONFIRMED
    pair.reader.thread.cancel("c-confirm")
    assert pair.lost("c-confirm") is LossReason.CANCELLED
    assert "KvReady" not in pair.reader.seen("c-confirm")


def test_cancel_after_the_end_is_nothing(pair: Pair) -> None:
    pair.read("c-late")
    pair.reader.await_event(KvReady, "c-late")
    pair.reader.thread.cancel("c-late")
    pair.source.thread.cancel("c-late")
    pair.read("c-later")  # handled after those cancels
    pair.reader.await_event(KvReady, "c-later")
    assert "KvLost" not in pair.reader.seen("c-late")


def test_withdrawn_offer_is_dropped_by_the_source(pair: Pair) -> None:
    pair.arrive("withdrawn")
    pair.source.thread.cancel("withdrawn")
    assert pair.source_outcome("withdrawn") is SourceOutcome.CANCELLED
    assert pair.lost("withdrawn") is LossReason.DROPPED


def test_a_silent_readers_lease_expires_and_it_is_told(pair: Pair) -> None:
    pair.reader.faults.held = {"send_renew"}
    pair.arrive("expired")
    assert pair.source_outcome("expired") is SourceOutcome.EXPIRED
    assert pair.lost("expired") is LossReason.REFUSED


def test_a_read_that_ends_after_its_lease_is_refused(pair: Pair) -> None:
    pair.reader.faults.held = {"send_renew", "end_read"}
    pair.source.faults.held = {"send_refuse"}
    pair.read("late")
    assert pair.source_outcome("late") is SourceOutcome.EXPIRED
    pair.reader.faults.held = {"send_renew"}
    pair.reader.await_event(ReadReleased, "late")
    pair.source.faults.asked.clear()
    until(lambda: pair.source.faults.asked.count("send_refuse") > 3)  # DONEs keep coming
    assert pair.reader.seen("late") == ["HandoffArrived", "ReadReleased"]
    pair.source.faults.held = set()
    assert pair.lost("late") is LossReason.REFUSED


def test_a_renewed_lease_outlives_its_first_term(pair: Pair) -> None:
    pair.arrive("renewed")
    start_s = time.monotonic()
    until(lambda: time.monotonic() - start_s > 2.5 * TIMING.lease_s)
    pair.reader.thread.read_into("renewed", pair.reader_ids)
    pair.reader.await_event(KvReady, "renewed")


def test_duplicate_handoffs_arrive_once(pair: Pair) -> None:
    pair.reader.faults.held = {"send_renew"}
    pair.source.faults.asked.clear()
    pair.arrive("twice")
    until(lambda: pair.source.faults.asked.count("send_handoff") >= 4)
    pair.reader.faults.held = set()
    pair.reader.thread.read_into("twice", pair.reader_ids)
    pair.reader.await_event(KvReady, "twice")
    assert pair.reader.seen("twice") == ["HandoffArrived", "ReadReleased", "KvReady"]


def test_deadline_without_a_handoff(pair: Pair) -> None:
    pair.expect("never", after_s=0.05)
    assert pair.lost("never") is LossReason.DEADLINE


def test_unusable_peers_are_told_at_once(pair: Pair) -> None:
    junk = replace(pair.source.peer, agent_name="x-1", epoch="1", agent_metadata=b"junk")
    pair.reader.thread.expect("junk-in", junk, 40, 3, deadline_s())
    assert pair.lost("junk-in") is LossReason.PEER_UNREACHABLE
    pair.source.thread.offer("junk-out", junk, (1,), 5, (), deadline_s())
    assert pair.source_outcome("junk-out") is SourceOutcome.PEER_UNREACHABLE


def test_blocks_outside_the_pool_are_lost_not_read(pair: Pair) -> None:
    pair.arrive("outside")
    pair.reader.thread.read_into("outside", (0, 1, 32))
    assert pair.lost("outside") is LossReason.READ_FAILED
    assert pair.reader.seen("outside") == ["HandoffArrived", "ReadReleased", "KvLost"]


def test_impossible_commands_are_refused(pair: Pair) -> None:
    pair.arrive("once")
    pair.expect("once")
    pair.reader.await_event(CommandRefused, "once")
    pair.source.thread.offer("once", pair.reader.peer, (1,), 40, (), deadline_s())
    pair.source.await_event(CommandRefused, "once")
    pair.source.thread.offer("outside-offer", pair.reader.peer, (99,), 40, (), deadline_s())
    pair.source.await_event(CommandRefused, "outside-offer")
    pair.reader.thread.read_into("once", pair.reader_ids)
    pair.reader.await_event(KvReady, "once")


def test_a_raising_callback_does_not_stop_the_thread(pair: Pair) -> None:
    pair.reader.raises = True
    pair.read("raises")
    pair.reader.await_event(KvReady, "raises")
    pair.reader.raises = False
    assert pair.reader.thread.snapshot().errors["callback"] >= 2


def test_many_transfers_at_once(pair: Pair) -> None:
    ids = [f"many-{number}" for number in range(20)]
    kv = torch.randn(20, *SHAPE[1:])
    pair.source.pool[:20] = kv
    for number, transfer_id in enumerate(ids):
        pair.reader.thread.expect(transfer_id, pair.source.peer, 10, 1, deadline_s())
        pair.source.thread.offer(transfer_id, pair.reader.peer, (number,), 10, (), deadline_s())
    for number, transfer_id in enumerate(ids):
        pair.reader.await_event(HandoffArrived, transfer_id)
        pair.reader.thread.read_into(transfer_id, (31 - number,))
    for transfer_id in ids:
        pair.reader.await_event(KvReady, transfer_id)
    assert torch.equal(pair.reader.pool[12:].flip(0), kv)


def test_idle_thread_is_cheap_and_its_heart_beats(pair: Pair) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name == "kv-transfer"]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
    pair.reader.await_idle()
    pair.source.await_idle()
    start_s, cpu_s = time.monotonic(), sum(map(time.clock_gettime, clocks))
    until(lambda: time.monotonic() - start_s > 0.5)
    assert (sum(map(time.clock_gettime, clocks)) - cpu_s) / len(clocks) < 0.02 * 0.5
    beat_s = pair.reader.thread.last_poll_s
    until(lambda: pair.reader.thread.last_poll_s > beat_s)


# -- over the fake network -----------------------------------------------------------------------------------------


class Harsh(NetworkFaults):
    def __init__(self, read_delay_s: float) -> None:
        self.read_delay_s = read_delay_s

    def read_fate(self, reader: str, source: str) -> ReadFate:
        return ReadFate(self.read_delay_s)


def fake_engine(network: FakeNetwork, replica_id: str) -> Engine:
    def make(pool: torch.Tensor) -> FakeTransport:
        block_bytes = pool[0].numel() * pool.element_size()
        return FakeTransport(network, bytearray(SHAPE[0] * block_bytes), block_bytes, replica_id, "1")

    return Engine(make, verify=False)


def fake_pair(network: FakeNetwork) -> Pair:
    return Pair(fake_engine(network, "prefill"), fake_engine(network, "decode"))


def test_a_read_that_never_ends_is_quarantined_and_stop_says_so() -> None:
    pair = fake_pair(FakeNetwork(faults=Harsh(math.inf)))
    pair.read("stuck")
    pair.reader.thread.cancel("stuck")
    assert pair.lost("stuck") is LossReason.CANCELLED
    until(lambda: pair.reader.thread.snapshot().reads_quarantined == 1)
    assert not pair.reader.thread.stop(timeout_s=0.05)
    assert not pair.reader.thread.is_alive()
    assert pair.reader.seen("stuck") == ["HandoffArrived", "KvLost"]
    assert pair.source.thread.stop()


def test_stop_cancels_tells_the_peer_and_waits_for_reads() -> None:
    pair = fake_pair(FakeNetwork(faults=Harsh(0.1)))
    pair.expect("open")
    pair.read("reading")
    until(lambda: pair.reader.thread.snapshot().reads_in_flight == 1)
    assert pair.reader.thread.stop()
    assert pair.reader.seen("open") == ["KvLost"]
    assert pair.reader.seen("reading") == ["HandoffArrived", "KvLost", "ReadReleased"]
    assert pair.source_outcome("reading") is SourceOutcome.DROPPED
    assert pair.source.thread.stop()
    assert pair.source.thread.stop()


def test_a_dead_peer_is_forgotten_on_both_sides() -> None:
    network = FakeNetwork()
    pair = fake_pair(network)
    pair.arrive("dead")
    network.kill(pair.reader.peer.agent_name)
    pair.source.thread.forget_peer(pair.reader.peer.agent_name)
    assert pair.source_outcome("dead") is SourceOutcome.PEER_DEAD
    pair.reader.thread.forget_peer(pair.source.peer.agent_name)
    assert pair.lost("dead") is LossReason.PEER_DEAD
    pair.source.thread.stop()
    pair.reader.thread.stop()


def test_a_strangers_bytes_are_counted_and_change_nothing() -> None:
    network = FakeNetwork()
    pair = fake_pair(network)
    pair.arrive("calm")
    for payload in (b"", b"junk", b"\x93\x01\x02\x03", b"\x80" * 1000):
        network.post("stranger", pair.reader.peer.agent_name, payload)
    until(lambda: pair.reader.thread.snapshot().errors.get("malformed") == 4)
    pair.reader.thread.read_into("calm", pair.reader_ids)
    pair.reader.await_event(KvReady, "calm")
    pair.source.thread.stop()
    pair.reader.thread.stop()


class Broken(FakeTransport):
    """Whatever this transport is asked, it raises something unexpected."""

    broken = False

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        self._maybe()
        return super().poll_notifications()

    def load_peer(self, peer: TransferPeer) -> None:
        self._maybe()
        super().load_peer(peer)

    def remove_peer(self, agent_name: str) -> None:
        self._maybe()
        super().remove_peer(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        self._maybe()
        super().notify(agent_name, payload)

    def _maybe(self) -> None:
        if self.broken:
            raise OSError("the transport is broken")


def test_a_broken_transport_becomes_events_not_a_dead_thread() -> None:
    network = FakeNetwork()
    transports: list[Broken] = []

    def make(pool: torch.Tensor) -> KvTransport:
        transports.append(Broken(network, bytearray(SHAPE[0] * 64), 64, "decode", "1"))
        return transports[0]

    pair = Pair(fake_engine(network, "prefill"), Engine(make, verify=False))
    transports[0].broken = True
    pair.expect("broken")
    assert pair.lost("broken") is LossReason.PEER_UNREACHABLE
    pair.reader.thread.offer("broken-out", pair.source.peer, (1,), 3, (), deadline_s())
    pair.reader.await_event(CommandRefused, "broken-out")
    pair.reader.thread.forget_peer("whoever")
    until(lambda: pair.reader.thread.snapshot().errors.get("poll", 0) > 2)
    transports[0].broken = False
    pair.expect("mended", after_s=0.05)
    assert pair.lost("mended") is LossReason.DEADLINE
    assert pair.reader.thread.is_alive()
    assert pair.reader.thread.stop()
    assert pair.source.thread.stop()


def test_a_transport_that_cannot_start_is_the_callers_exception() -> None:
    def make() -> KvTransport:
        raise OSError("no device")

    thread = TransferThread(make, print, TIMING)
    with pytest.raises(RuntimeError):
        thread.cancel("too early")
    assert thread.stop()
    with pytest.raises(OSError, match="no device"):
        thread.start()
    assert thread.stop()
    assert not thread.is_alive()
