"""Reads wait for their turn: in order of arrival, so many bytes from one peer at a time, and what waits can end."""

from __future__ import annotations

import math

import pytest

from replicas.messages import Handoff, Token
from tests.replicas.driver_rig import BLOCK_BYTES, Rig
from tests.replicas.fake_transport import NetworkFaults, ReadFate


class Slow(NetworkFaults):
    """Every pair moves 100 blocks a second. num_reads: started, of KV. stuck: how many of the first never end."""

    def __init__(self, num_stuck: int = 0, is_known: bool = True) -> None:
        self.num_reads, self.num_stuck, self.is_known = 0, num_stuck, is_known

    def bytes_per_s(self, reader: str, source: str) -> float:
        return 100.0 * BLOCK_BYTES

    def read_fate(self, reader: str, source: str) -> ReadFate:
        self.num_reads += 1
        is_stuck = self.num_reads <= self.num_stuck
        return ReadFate(math.inf if is_stuck and self.is_known else 0.0, is_known=self.is_known or not is_stuck)


def a_pair(max_blocks_in_flight: int) -> tuple[Rig, Slow]:
    """Which have met, and measured each other."""
    faults = Slow()
    rig = Rig(faults, max_blocks_in_flight * BLOCK_BYTES)
    rig.expect("meet")
    rig.run(0.5)
    rig.reader.cancel("meet")
    return rig, faults


def four_at_once(max_blocks_in_flight: int) -> tuple[Rig, Slow]:
    """Of 10 blocks each, 0.1 s."""
    rig, faults = a_pair(max_blocks_in_flight)
    for number in range(4):
        rig.hand_over(f"t{number}", tuple(range(10 * number, 10 * number + 10)))
    return rig, faults


def test_what_comes_later_is_posted_when_there_is_room() -> None:
    rig, faults = four_at_once(max_blocks_in_flight=20)
    assert faults.num_reads == 2
    assert (len(rig.reader.reads.in_flight), rig.reader.reads.num_waiting) == (2, 2)
    rig.run(0.1)
    assert faults.num_reads == 3
    rig.run(0.4)
    ready = [transfer_id for _, kind, transfer_id in rig.events if kind == "KvReady"]
    assert ready == ["t0", "t1", "t2", "t3"]
    assert rig.reader_pool[: 40 * BLOCK_BYTES] == b"\x07" * 40 * BLOCK_BYTES
    assert rig.reader.reads.num_waiting == 0
    assert not rig.reader.reads.in_flight
    assert not rig.reader.is_busy


def test_one_that_is_larger_than_all_that_may_be_under_way_goes_alone() -> None:
    rig, faults = four_at_once(max_blocks_in_flight=1)
    assert faults.num_reads == 1
    rig.run(0.55)
    assert [rig.when("KvReady", f"t{number}") for number in range(4)] == sorted(
        rig.when("KvReady", f"t{number}") for number in range(4)
    )
    assert faults.num_reads == 4


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    faults = Slow()
    rig = Rig(faults, 10 * BLOCK_BYTES)
    rig.hand_over("first", tuple(range(9)))
    rig.hand_over("large", tuple(range(10, 19)))
    rig.hand_over("small", (20,))
    assert list(rig.reader.reads.in_flight) == ["first"]
    rig.run(0.6)
    assert rig.when("KvReady", "large") <= rig.when("KvReady", "small")


def test_only_the_bytes_that_are_read_count() -> None:
    """Of 10 blocks each, 8 and 2 kept: both fit under 10, the first ends after 2 blocks' time, a third must wait."""
    rig, faults = a_pair(max_blocks_in_flight=10)
    rig.hand_over("few", tuple(range(10)), num_kept=8)
    begun_s = rig.time_s - 100.0
    rig.hand_over("many", tuple(range(10, 20)), num_kept=2)
    rig.hand_over("next", tuple(range(20, 30)), num_kept=9)
    assert sorted(rig.reader.reads.in_flight) == ["few", "many"]
    assert (faults.num_reads, rig.reader.reads.num_waiting) == (2, 1)
    rig.run(0.4)
    assert rig.when("KvReady", "few") - begun_s == pytest.approx(0.02, abs=0.006)
    assert [kind for _, kind, _ in rig.events].count("KvReady") == 3
    assert rig.reader.reads.bytes_read == (2 + 8 + 1) * BLOCK_BYTES
    read = {8, 9, *range(12, 20), 29}
    for block in range(30):
        content = rig.reader_pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert content == bytes([7 if block in read else 0]) * BLOCK_BYTES


def test_where_all_is_kept_nothing_waits_for_a_turn() -> None:
    faults = Slow(num_stuck=1)
    rig = Rig(faults, BLOCK_BYTES)
    rig.hand_over("stuck", tuple(range(10)))
    rig.hand_over("waits", tuple(range(10, 20)))
    rig.hand_over("kept", tuple(range(20, 30)), num_kept=10)
    rig.run(0.02)
    assert rig.seen("kept") == ["HandoffArrived", "ReadReleased", "KvReady"]
    assert rig.seen("waits") == ["HandoffArrived"]
    assert rig.reader.results == {"ready": 1}
    assert rig.sources[0].results == {"source: confirmed": 1}
    assert (faults.num_reads, rig.reader.reads.bytes_read) == (1, 0)
    assert rig.is_untouched


def test_the_source_of_one_that_is_kept_may_be_gone() -> None:
    """Its first tokens do not count then: the source did not confirm them."""
    rig = Rig(Slow())
    rig.expect("kept", num_blocks=2, after_s=0.3)
    rig.hand_over("met", (5,))
    rig.run(0.1)
    source = rig.sources[0]
    first = (Token("kept", 0, 0, 1, None),)
    handoff = Handoff("kept", "1", "1", "fake", (3, 4), 4, None, first, 1.0, (), 0, True)
    source.offer(handoff, rig.reader.local_peer, rig.time_s + 1.0)
    rig.run(0.002)
    rig.network.kill(source.local_peer.agent_name)
    rig.reader.read_into("kept", (3, 4), 2)
    rig.sources.clear()
    rig.run(0.4)
    assert rig.seen("kept") == ["HandoffArrived", "ReadReleased", "KvLost"]
    assert rig.reader.results["lost: deadline"] == 1
    assert rig.reader.num_landing == 0
    assert not rig.reader.reader.num_open


def test_peers_do_not_wait_for_each_other() -> None:
    faults = Slow()
    rig = Rig(faults, 10 * BLOCK_BYTES, num_sources=2)
    rig.hand_over("a0", tuple(range(10)))
    rig.hand_over("a1", tuple(range(10, 20)))
    rig.hand_over("b0", tuple(range(20, 30)), source=1)
    assert sorted(rig.reader.reads.in_flight) == ["a0", "b0"]


def test_cancelling_one_that_waits_gives_its_blocks_back_at_once() -> None:
    rig, faults = four_at_once(max_blocks_in_flight=10)
    rig.reader.cancel("t2")
    assert rig.seen("t2") == ["HandoffArrived", "KvLost", "ReadReleased"]
    rig.run(0.5)
    assert faults.num_reads == 3, "it was never posted"
    assert not any(rig.reader_pool[20 * BLOCK_BYTES : 30 * BLOCK_BYTES])
    assert [rig.seen(f"t{number}")[-1] for number in (0, 1, 3)] == ["KvReady"] * 3
    assert rig.sources[0].source.num_open == 0, "the source was told"


def test_deadlines_and_leases_of_those_that_wait_hold() -> None:
    """The lease is 1 s: renewed while it waits for longer. A deadline ends the wait."""
    faults = Slow()
    rig = Rig(faults, BLOCK_BYTES)
    for number in range(40):
        rig.hand_over(f"t{number}", (number,))
    rig.hand_over("late", (40,), after_s=0.2)
    rig.hand_over("long", tuple(range(20)))
    rig.run(0.1)
    assert rig.seen("late") == ["HandoffArrived"]
    rig.run(0.15)
    assert rig.seen("late") == ["HandoffArrived", "KvLost", "ReadReleased"]
    rig.hand_over("last", tuple(range(20, 44)))
    for number in range(8):
        rig.hand_over(f"more{number}", tuple(range(20)))
    rig.run(3.0)
    assert rig.when("KvReady", "more7") > 1.5, "it waited for longer than a lease"


def test_those_of_a_dead_peer_end_and_wait_for_nothing() -> None:
    rig, faults = four_at_once(max_blocks_in_flight=10)
    rig.network.kill(rig.sources[0].local_peer.agent_name)
    rig.sources.clear()
    rig.reader.forget_peer("prefill-0-1")
    assert [rig.seen(f"t{number}") for number in (1, 2, 3)] == [["HandoffArrived", "KvLost", "ReadReleased"]] * 3
    rig.run(0.2)
    assert rig.seen("t0") == ["HandoffArrived", "KvLost", "ReadReleased"]
    assert faults.num_reads == 1
    assert rig.reader.num_landing == 0


@pytest.mark.parametrize("is_known", [True, False], ids=["it hangs", "it failed in part"])
def test_a_read_that_never_ends_does_not_hold_up_the_others_for_ever(is_known: bool) -> None:
    faults = Slow(num_stuck=1, is_known=is_known)
    rig = Rig(faults, BLOCK_BYTES)
    rig.hand_over("stuck", tuple(range(2)), after_s=0.3)
    rig.hand_over("next", tuple(range(2, 4)))
    rig.run(0.4)
    assert "ReadReleased" not in rig.seen("stuck")
    assert rig.seen("stuck")[-1] == "KvLost"
    rig.run(0.6)  # quarantined by now
    assert rig.seen("next") == ["HandoffArrived", "ReadReleased", "KvReady"]
    assert "ReadReleased" not in rig.seen("stuck")
    assert rig.reader.num_landing == 1


def test_cancel_all_lets_go_of_all_that_wait() -> None:
    rig, _ = four_at_once(max_blocks_in_flight=10)
    rig.reader.cancel_all()
    assert [rig.seen(f"t{number}")[-1] for number in (1, 2, 3)] == ["ReadReleased"] * 3
    rig.run(0.2)
    assert rig.seen("t0")[-1] == "ReadReleased"
    assert rig.reader.num_landing == 0
