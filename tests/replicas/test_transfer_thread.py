"""Transfer threads of two engines over real NIXL, CPU to CPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replicas.kv.handoff_actions import (
    CommandRefused,
    HandoffArrived,
    HandoffTiming,
    KvReady,
    LossReason,
    ReaderChecked,
    ReadReleased,
    SourceOutcome,
)
from replicas.kv.nixl_address import NixlAddress
from replicas.kv.nixl_transport import NixlTransport
from replicas.kv.pair_rate import PairRate
from replicas.messages import Token
from tests.replicas.transfer_engines import HURRIED, SHAPE, TIMING, WAIT_S, Engine, Pair, deadline_s, until


@contextmanager
def nixl_pair(timing: HandoffTiming) -> Iterator[Pair]:
    source = Engine(lambda pool: NixlTransport(pool, "prefill-0", "s1", "f"), timing=timing)
    reader = Engine(lambda pool: NixlTransport(pool, "decode-0", "r1", "f"), timing=timing)
    yield Pair(source, reader)
    assert reader.thread.stop(WAIT_S)
    assert source.thread.stop(WAIT_S)


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with nixl_pair(TIMING) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """A test leaves it without anything open, or fails."""
    yield shared_pair
    shared_pair.release_holds()
    shared_pair.reader.await_idle()
    shared_pair.source.await_idle()
    assert shared_pair.reader.thread.is_alive()
    assert shared_pair.source.thread.is_alive()


@pytest.fixture
def hurried() -> Iterator[Pair]:
    """Its leases are short."""
    with nixl_pair(HURRIED) as pair:
        yield pair
        pair.release_holds()
        pair.reader.await_idle()
        pair.source.await_idle()


def test_happy_path_delivers_the_kv_before_the_source_reuses_its_blocks(pair: Pair) -> None:
    before = pair.reader.thread.snapshot()
    arrived = pair.arrive("happy")
    assert arrived.handoff.first_tokens == (Token("happy", 0, 0, 42, None),)
    assert arrived.handoff.digests is not None
    pair.reader.thread.read_into("happy", pair.reader_ids, 0)
    pair.reader.await_event(KvReady, "happy")
    assert pair.source_outcome("happy") is SourceOutcome.CONFIRMED
    assert torch.equal(pair.reader.pool[list(pair.reader_ids)], pair.kv)
    assert not pair.source.pool[list(pair.source_ids)].any()  # after_confirm
    assert pair.reader.seen("happy") == ["HandoffArrived", "ReadReleased", "KvReady"]
    after = pair.reader.thread.snapshot()
    assert after.results["ready"] == before.results.get("ready", 0) + 1
    assert after.bytes_read - before.bytes_read == 3 * pair.reader.peer.block_bytes
    assert after.read_s > before.read_s


def test_a_pair_is_measured_when_it_meets() -> None:
    """By reads of growing size, into no block of the pool. Where this machine stands still they are given up: then
    another pair."""
    rate = next(filter(None, (measured() for _ in range(5))))
    assert rate.replica_id == "prefill-0"
    assert 0.0 < rate.bytes_per_s < 1e12
    assert 0.0 < rate.latency_s < WAIT_S


def measured() -> PairRate | None:
    with nixl_pair(TIMING) as pair:
        pair.expect("measured")
        reader = pair.reader.thread
        until(lambda: reader.snapshot().rates or reader.snapshot().errors.get("probe"))
        rate = reader.snapshot().rates.get("prefill-0-s1")
        assert rate is None or reader.slowest_pair() == rate
        assert pair.source.thread.snapshot().rates == {}, "it reads nothing"
        assert not pair.reader.pool.any()
        reader.cancel("measured")
        return rate


def test_corrupted_block_is_lost(pair: Pair) -> None:
    pair.reader.faults.corrupts = True
    pair.read("corrupt")
    assert pair.lost("corrupt") is LossReason.DIGEST_MISMATCH
    assert pair.reader.seen("corrupt") == ["HandoffArrived", "ReadReleased", "KvLost"]


def test_source_blocks_that_change_after_the_offer_are_noticed(pair: Pair) -> None:
    pair.arrive("changed")
    pair.source.pool[4, 0, 0, 0, 0, 0] += 1
    pair.reader.thread.read_into("changed", pair.reader_ids, 0)
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
    pair.reader.thread.read_into("c-memory", pair.reader_ids, 0)  # the engine did not know yet
    pair.reader.await_event(ReadReleased, "c-memory")


def test_cancel_during_the_read_releases_the_blocks_only_at_its_end(pair: Pair) -> None:
    pair.reader.faults.held = {"end_read"}
    pair.read("c-read")
    until(lambda: pair.reader.thread.snapshot().reads_in_flight == 1)
    pair.reader.thread.cancel("c-read")
    assert pair.lost("c-read") is LossReason.CANCELLED
    # The reader does not look at its read any more, but the transport ends it, and may tell the source so first.
    assert pair.source_outcome("c-read") in (SourceOutcome.DROPPED, SourceOutcome.CONFIRMED)
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


def test_a_silent_readers_lease_expires_and_it_is_told(hurried: Pair) -> None:
    pair = hurried
    pair.reader.faults.held = {"send_renew"}
    pair.arrive("expired")
    assert pair.source_outcome("expired") is SourceOutcome.EXPIRED
    assert pair.lost("expired") is LossReason.REFUSED


def test_a_read_that_ends_after_its_lease_is_refused(hurried: Pair) -> None:
    """It is held before it starts: UCX may end one, and tell the source so, in the call that starts it."""
    pair = hurried
    pair.reader.faults.held = {"send_renew", "start_read"}
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


def test_a_renewed_lease_outlives_its_first_term(hurried: Pair) -> None:
    """One whose reader's machine stands still for as long as a lease is over: then again."""

    def outlives(transfer_id: str) -> bool:
        hurried.arrive(transfer_id)
        start_s = time.monotonic()
        until(lambda: time.monotonic() - start_s > 2.5 * HURRIED.lease_s)
        hurried.reader.thread.read_into(transfer_id, hurried.reader_ids, 0)
        until(lambda: {"KvReady", "KvLost"} & set(hurried.reader.seen(transfer_id)))
        return "KvReady" in hurried.reader.seen(transfer_id)

    assert any(outlives(f"renewed-{number}") for number in range(5))


def test_duplicate_handoffs_arrive_once(pair: Pair) -> None:
    pair.reader.faults.held = {"send_renew"}
    pair.source.faults.asked.clear()
    pair.arrive("twice")
    until(lambda: pair.source.faults.asked.count("send_handoff") >= 4)
    pair.reader.faults.held = set()
    pair.reader.thread.read_into("twice", pair.reader_ids, 0)
    pair.reader.await_event(KvReady, "twice")
    assert pair.reader.seen("twice") == ["HandoffArrived", "ReadReleased", "KvReady"]


def test_deadline_without_a_handoff(pair: Pair) -> None:
    pair.expect("never", after_s=0.05)
    assert pair.lost("never") is LossReason.DEADLINE


def test_unusable_peers_are_told_at_once(pair: Pair) -> None:
    address = replace(NixlAddress.decode(pair.source.peer.address), agent_metadata=b"junk")
    junk = replace(pair.source.peer, agent_name="x-1", epoch="1", address=address.encode())
    pair.reader.thread.expect("junk-in", junk, 40, 3, deadline_s())
    assert pair.lost("junk-in") is LossReason.PEER_UNREACHABLE
    pair.source.thread.check_reader("junk-out", junk)
    checked = pair.source.await_event(ReaderChecked, "junk-out")
    assert isinstance(checked, ReaderChecked)
    assert "metadata of x-1 is unusable" in checked.problem
    pair.source.thread.offer("junk-out", junk, (1,), 5, (), deadline_s())
    assert pair.source_outcome("junk-out") is SourceOutcome.PEER_UNREACHABLE


def test_peers_come_and_go_and_leave_nothing_behind() -> None:
    """Each hands something over and leaves, in peace: nobody tells the one that stays. Files and memory stay flat.

    In a process of its own: in that of the tests memory is other tests' too.
    """
    program = "import json; from tests.replicas.test_transfer_thread import visits; print(json.dumps(visits(20)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seen = json.loads(answer.stdout.splitlines()[-1])
    first, later = seen[:5], seen[5:]
    assert max(files for files, _ in later) <= max(files for files, _ in first)
    assert later[-1][1] - first[-1][1] < 4096, (first, later)


def visits(number: int) -> list[tuple[int, int]]:
    """So many sources come to one reader and leave: (open files, KiB of memory) once each has gone."""
    reader = Engine(lambda pool: NixlTransport(pool, "decode-1", "r1", "f"))

    def come_and_go(number: int) -> tuple[int, int]:
        source = Engine(lambda pool: NixlTransport(pool, f"prefill-{number}", "s1", "f"))
        pair = Pair(source, reader)
        pair.read(f"visit-{number}")
        reader.await_event(KvReady, f"visit-{number}")
        source.await_idle()
        assert source.thread.stop(WAIT_S)
        until(lambda: not reader.thread.snapshot().peers_loaded)
        reader.await_turn()  # it is not counted any more before it is unloaded
        del pair, source
        gc.collect()  # what it was made of itself
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(list(Path("/proc/self/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") // 1024

    seen = [come_and_go(i) for i in range(number)]
    assert reader.thread.stop(WAIT_S)
    return seen


def test_blocks_outside_the_pool_are_lost_not_read(pair: Pair) -> None:
    pair.arrive("outside")
    pair.reader.thread.read_into("outside", (0, 1, 32), 0)
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
    pair.reader.thread.read_into("once", pair.reader_ids, 0)
    pair.reader.await_event(KvReady, "once")


def test_a_raising_callback_does_not_stop_the_thread(pair: Pair) -> None:
    pair.reader.raises = True
    pair.read("raises")
    pair.reader.await_event(KvReady, "raises")
    pair.reader.raises = False
    assert pair.reader.thread.snapshot().errors["callback"] >= 2


def test_many_transfers_at_once(pair: Pair) -> None:
    move_many(pair)


def test_many_transfers_one_read_at_a_time() -> None:
    source = Engine(lambda pool: NixlTransport(pool, "prefill-0", "s2", "f"))
    reader = Engine(lambda pool: NixlTransport(pool, "decode-0", "r2", "f"), max_bytes_in_flight=1)
    most: list[int] = []
    reader.faults.hold = lambda point: most.append(reader.thread.snapshot().reads_in_flight) or False  # type: ignore[method-assign,func-returns-value]
    move_many(Pair(source, reader))
    assert max(most) == 1
    for engine in (reader, source):
        assert engine.thread.stop(WAIT_S)


def move_many(pair: Pair) -> None:
    ids = [f"many-{number}" for number in range(20)]
    kv = torch.randn(20, *SHAPE[1:])
    pair.source.pool[:20] = kv
    for number, transfer_id in enumerate(ids):
        pair.reader.thread.expect(transfer_id, pair.source.peer, 10, 1, deadline_s())
        pair.source.thread.offer(transfer_id, pair.reader.peer, (number,), 10, (), deadline_s())
    for number, transfer_id in enumerate(ids):
        pair.reader.await_event(HandoffArrived, transfer_id)
        pair.reader.thread.read_into(transfer_id, (31 - number,), 0)
    for transfer_id in ids:
        pair.reader.await_event(KvReady, transfer_id)
    assert torch.equal(pair.reader.pool[12:].flip(0), kv)


def cpu_share(clocks: list[int]) -> float:
    """Of a CPU, that a thread takes within half a second, or as much longer as the machine stands still."""
    start_s, cpu_s = time.monotonic(), sum(map(time.clock_gettime, clocks))
    until(lambda: time.monotonic() - start_s > 0.5)
    used_s = sum(map(time.clock_gettime, clocks)) - cpu_s
    return used_s / (time.monotonic() - start_s) / len(clocks)


def test_idle_thread_is_cheap_and_its_heart_beats(pair: Pair) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name == "kv-transfer"]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
    pair.reader.await_idle()
    pair.source.await_idle()
    shares = [cpu_share(clocks) for _ in range(3)]
    assert min(shares) < 0.02, "a hundredth; all of it if it spins"
    beat_s = pair.reader.thread.last_poll_s
    until(lambda: pair.reader.thread.last_poll_s > beat_s)
