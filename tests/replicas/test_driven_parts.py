"""Drivers of handoffs in parts: what is refused, who is not reached, and which reads wait for their turn."""

from __future__ import annotations

from replicas.kv.transfer_driver import TransferDriver
from replicas.messages import Handoff, Token
from tests.replicas.driver_rig import BLOCK_BYTES, NUM_BLOCKS, Rig
from tests.replicas.fake_transport import NetworkFaults

IDS = (3, 4, 5, 9)


def part(rig: Rig, first: int, end: int) -> Handoff:
    epochs = (rig.sources[0].local_peer.epoch, rig.reader.local_peer.epoch)
    tokens = (Token("t", 0, 0, 1, None),) if end == len(IDS) else ()
    return Handoff("t", *epochs, "fake", IDS[first:end], 4, None, tokens, 1.0, (), first, end == len(IDS))


def offer(rig: Rig, handoff: Handoff) -> TransferDriver:
    source = rig.sources[0]
    source.offer(handoff, rig.reader.local_peer, rig.time_s + 60.0)
    rig.run(0.01)
    return source


def test_parts_are_read_as_they_come() -> None:
    rig = Rig(NetworkFaults())
    rig.expect("t", num_blocks=4)
    offer(rig, part(rig, 0, 2))
    rig.reader.read_into("t", IDS, 0)
    rig.run(0.01)
    assert rig.reader.reads.bytes_read == 2 * BLOCK_BYTES
    offer(rig, part(rig, 2, 3))
    assert rig.reader.reads.bytes_read == 3 * BLOCK_BYTES
    assert rig.seen("t") == ["HandoffArrived"]
    source = offer(rig, part(rig, 3, 4))
    assert rig.seen("t") == ["HandoffArrived", "LastPartArrived", "ReadReleased", "KvReady"]
    assert source.results == {"source: confirmed": 1}
    whole = b"".join(bytes([7 if block in IDS else 0]) * BLOCK_BYTES for block in range(NUM_BLOCKS))
    assert bytes(rig.reader_pool) == whole


def test_a_part_that_does_not_follow_ends_the_transfer_and_the_reader_is_told() -> None:
    rig = Rig(NetworkFaults())
    rig.expect("t", num_blocks=4)
    offer(rig, part(rig, 0, 2))
    rig.reader.read_into("t", IDS, 0)
    source = offer(rig, part(rig, 3, 4))
    assert source.results == {"source: cancelled": 1}
    assert source.errors["refused"] == 1
    assert rig.seen("t") == ["HandoffArrived", "KvLost", "ReadReleased"]
    offer(rig, part(rig, 2, 4))
    assert source.results == {"source: cancelled": 1}, "once"
    assert source.source.num_open == rig.reader.reader.num_open == 0


def test_a_reader_that_is_not_reached_is_told_of_once() -> None:
    rig = Rig(NetworkFaults())
    rig.network.kill(rig.reader.local_peer.agent_name)
    for first, end in ((0, 2), (2, 3), (3, 4)):
        source = offer(rig, part(rig, first, end))
    assert source.results == {"source: peer unreachable": 1}
    assert source.errors == {"unreachable": 1}


def test_a_short_prompt_is_read_between_two_parts_of_a_long_one() -> None:
    """They take turns: so a long prompt's read does not delay a short one's."""

    class Slow(NetworkFaults):
        def bytes_per_s(self, reader: str, source: str) -> float:
            return 10.0 * BLOCK_BYTES

    rig = Rig(Slow(), max_bytes_in_flight=BLOCK_BYTES)
    rig.expect("meet")
    rig.run(1.0)  # they have measured each other
    rig.expect("t", num_blocks=4)
    offer(rig, part(rig, 0, 2))
    rig.reader.read_into("t", IDS, 0)
    rig.run(0.01)
    rig.hand_over("short", (20,))
    offer(rig, part(rig, 2, 4))
    rig.run(1.0)
    assert rig.when("KvReady", "short") < rig.when("KvReady", "t")
