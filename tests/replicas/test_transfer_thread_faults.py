"""Transfer threads over the fake network: stuck reads, dead peers, strangers' bytes, a broken transport."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from replicas.channels.wire import decode_notification
from replicas.kv.handoff_actions import (
    CommandRefused,
    HandoffArrived,
    KvReady,
    LossReason,
    ReaderChecked,
    SourceOutcome,
)
from replicas.kv.kv_transport import KvTransport, PeerUnreachable
from replicas.kv.transfer_thread import TransferThread
from replicas.messages import Handoff, TransferPeer
from tests.replicas.fake_transport import FakeNetwork, FakeTransport, NetworkFaults, ReadFate
from tests.replicas.transfer_engines import SHAPE, TIMING, WAIT_S, Engine, Pair, deadline_s, until


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
    until(lambda: not pair.reader.thread.is_alive())  # where this machine stands still it is not waited for as long
    assert not pair.reader.thread.stop(), "the read is still in flight"
    assert pair.reader.seen("stuck") == ["HandoffArrived", "KvLost"]
    assert pair.source.thread.stop(WAIT_S)


class Partly(NetworkFaults):
    """Reads fail in part: what is left of them lands after a while, and nobody tells."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def read_fate(self, reader: str, source: str) -> ReadFate:
        return ReadFate(self.delay_s, is_known=False)


def test_a_read_that_failed_in_part_is_lost_at_once_and_its_blocks_stay_held() -> None:
    """The router need not wait for a deadline (here 10 s) to try another pair; nobody else gets the blocks."""
    pair = fake_pair(FakeNetwork(faults=Partly(0.05)))
    pair.read("partly")
    assert pair.lost("partly") is LossReason.READ_FAILED
    until(lambda: pair.reader.thread.snapshot().reads_quarantined == 1)
    assert pair.source_outcome("partly") is SourceOutcome.DROPPED
    assert pair.reader.seen("partly") == ["HandoffArrived", "KvLost"]
    assert not pair.reader.thread.stop(timeout_s=0.05)
    assert pair.reader.seen("partly") == ["HandoffArrived", "KvLost"]
    assert pair.source.thread.stop(WAIT_S)


def test_stop_cancels_tells_the_peer_and_waits_for_reads() -> None:
    """The read ends once stop has cancelled it: no sooner, however late that is."""
    pair = fake_pair(FakeNetwork())

    def hold(point: str) -> bool:
        return point == "end_read" and "KvLost" not in pair.reader.seen("reading")

    pair.reader.faults.hold = hold  # type: ignore[method-assign]
    pair.expect("open")
    pair.read("reading")
    until(lambda: pair.reader.thread.snapshot().reads_in_flight == 1)
    assert pair.reader.thread.stop(WAIT_S)
    assert pair.reader.seen("open") == ["KvLost"]
    assert pair.reader.seen("reading") == ["HandoffArrived", "KvLost", "ReadReleased"]
    assert pair.source_outcome("reading") is SourceOutcome.DROPPED
    assert pair.source.thread.stop(WAIT_S)
    assert pair.source.thread.stop(WAIT_S)


def test_a_dead_peer_is_forgotten_on_both_sides() -> None:
    network = FakeNetwork()
    pair = fake_pair(network)
    pair.arrive("dead")
    network.kill(pair.reader.peer.agent_name)
    pair.source.thread.forget_peer(pair.reader.peer.agent_name)
    assert pair.source_outcome("dead") is SourceOutcome.PEER_DEAD
    pair.reader.thread.forget_peer(pair.source.peer.agent_name)
    assert pair.lost("dead") is LossReason.PEER_DEAD
    pair.source.thread.stop(WAIT_S)
    pair.reader.thread.stop(WAIT_S)


def test_a_strangers_bytes_are_counted_and_change_nothing() -> None:
    network = FakeNetwork()
    pair = fake_pair(network)
    pair.arrive("calm")
    for payload in (b"", b"junk", b"\x93\x01\x02\x03", b"\x80" * 1000):
        network.post("stranger", pair.reader.peer.agent_name, payload)
    until(lambda: pair.reader.thread.snapshot().errors.get("malformed") == 4)
    pair.reader.thread.read_into("calm", pair.reader_ids, 0)
    pair.reader.await_event(KvReady, "calm")
    pair.source.thread.stop(WAIT_S)
    pair.reader.thread.stop(WAIT_S)


def test_a_peer_that_has_gone_is_unloaded_once_nothing_is_open_with_it() -> None:
    """Its process ended, in peace or not: nobody tells. What was open with it ends as it would have."""
    network = FakeNetwork()
    pair = fake_pair(network)
    pair.arrive("open")
    network.kill(pair.source.peer.agent_name)
    asked_s = time.monotonic() + 4 * TIMING.ask_peers_s
    until(lambda: time.monotonic() > asked_s)
    assert pair.reader.thread.snapshot().peers_loaded == 1
    assert pair.reader.seen("open") == ["HandoffArrived"]
    pair.reader.thread.cancel("open")
    until(lambda: not pair.reader.thread.snapshot().peers_loaded)
    assert pair.reader.thread.stop(WAIT_S)
    assert pair.source.thread.stop(WAIT_S)


def test_a_peer_that_stays_is_kept_however_quiet() -> None:
    pair = fake_pair(FakeNetwork())
    for transfer_id in ("one", "two"):
        pair.read(transfer_id)
        pair.reader.await_event(KvReady, transfer_id)
        for engine in (pair.source, pair.reader):
            engine.await_idle()
        asked_s = time.monotonic() + 4 * TIMING.ask_peers_s
        until(lambda: time.monotonic() > asked_s)  # noqa: B023
        assert [engine.thread.snapshot().peers_loaded for engine in (pair.source, pair.reader)] == [1, 1]
    for engine in (pair.source, pair.reader):
        assert not engine.thread.snapshot().errors
        assert engine.thread.stop(WAIT_S)


class Racing(FakeTransport):
    """Does something just before it looks for notifications."""

    before_poll: Callable[[], None] | None = None

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        action, self.before_poll = self.before_poll, None
        if action is not None:
            action()
        return super().poll_notifications()


class Breaking(Racing):
    """Its connections break, though everybody lives: what they are asked to carry raises, until they are made anew."""

    num_made = 0
    is_broken = False

    def load_peer(self, peer: TransferPeer) -> None:
        self.num_made += peer.agent_name not in self._peers
        super().load_peer(peer)

    def remove_peer(self, agent_name: str) -> None:
        super().remove_peer(agent_name)
        self.is_broken = False

    def notify(self, agent_name: str, payload: bytes) -> None:
        if self.is_broken:
            raise PeerUnreachable("the connection is broken")
        super().notify(agent_name, payload)


def test_a_broken_connection_is_known_before_the_offer_and_made_anew() -> None:
    network = FakeNetwork()
    transports: list[Breaking] = []

    def make(pool: torch.Tensor) -> KvTransport:
        block_bytes = pool[0].numel() * pool.element_size()
        transports.append(Breaking(network, bytearray(SHAPE[0] * block_bytes), block_bytes, "prefill", "1"))
        return transports[0]

    pair = Pair(Engine(make, verify=False), fake_engine(network, "decode"))

    def check(transfer_id: str) -> None:
        pair.source.thread.check_reader(transfer_id, pair.reader.peer)

    def problem(transfer_id: str) -> str:
        event = pair.source.await_event(ReaderChecked, transfer_id)
        assert isinstance(event, ReaderChecked)
        return event.problem

    def breaks() -> None:
        """Before a turn's commands, this check among them; at its end all peers may be asked, which mends it."""
        transports[0].is_broken = True
        check("b")

    check("a")
    assert problem("a") == ""
    transports[0].before_poll = breaks
    assert problem("b") == "the connection is broken"
    until(lambda: not transports[0].is_broken)
    check("c")
    assert problem("c") == ""
    assert transports[0].num_made == 2
    pair.read("d")
    pair.reader.await_event(KvReady, "d")
    for engine in (pair.source, pair.reader):
        assert engine.thread.stop(WAIT_S)


class Telling(NetworkFaults):
    """Tells that a handoff was sent; a poll from then on finds it."""

    def __init__(self) -> None:
        self.sent = threading.Event()

    def notification_delays_s(self, sender: str, receiver: str, payload: bytes) -> Sequence[float]:
        if isinstance(decode_notification(payload), Handoff):
            self.sent.set()
        return (0.0,)


def test_a_handoff_does_not_overtake_its_own_expect() -> None:
    faults = Telling()
    network = FakeNetwork(faults=faults)
    transports: list[Racing] = []

    def make(pool: torch.Tensor) -> KvTransport:
        block_bytes = pool[0].numel() * pool.element_size()
        transports.append(Racing(network, bytearray(SHAPE[0] * block_bytes), block_bytes, "decode", "1"))
        return transports[0]

    pair = Pair(fake_engine(network, "prefill"), Engine(make, verify=False))

    def race() -> None:
        pair.expect("race")
        pair.offer("race")
        assert faults.sent.wait(WAIT_S)

    pair.read("first")  # so that the reader can answer the source, with a drop if it were wrong
    pair.reader.await_event(KvReady, "first")
    pair.source.await_idle()
    faults.sent.clear()
    transports[0].before_poll = race
    pair.reader.await_event(HandoffArrived, "race")
    assert pair.source.thread.stop(WAIT_S)
    assert pair.reader.thread.stop(WAIT_S)


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
    assert pair.reader.thread.stop(WAIT_S)
    assert pair.source.thread.stop(WAIT_S)


def test_a_transport_that_cannot_start_is_the_callers_exception() -> None:
    def make() -> KvTransport:
        raise OSError("no device")

    thread = TransferThread(make, print, TIMING, 1 << 30)
    with pytest.raises(RuntimeError):
        thread.cancel("too early")
    assert thread.stop()
    with pytest.raises(OSError, match="no device"):
        thread.start()
    assert thread.stop()
    assert not thread.is_alive()


def test_a_reader_of_another_model_is_refused_before_the_prompt_is_computed() -> None:
    network = FakeNetwork()
    pair = Pair(fake_engine(network, "prefill"), fake_engine(network, "decode"))
    ours = "weights=aa config=cc tokenizer=tt dtype=float32 kv=k"
    pair.source.thread._running().local_peer = replace(pair.source.peer, fingerprint=ours)
    pair.source.thread.check_reader("t", replace(pair.reader.peer, fingerprint=ours.replace("aa", "bb")))
    event = pair.source.await_event(ReaderChecked, "t")
    assert isinstance(event, ReaderChecked)
    assert event.problem == "it has another model or layout: unlike weights"
    for engine in (pair.source, pair.reader):
        assert engine.thread.stop(WAIT_S)
