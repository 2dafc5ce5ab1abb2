"""Both halves joined over a network that drops, duplicates, delays and reorders, thousands of seeded runs.

What must hold whatever happens: KV that is called ready is the source's KV as offered, confirmed under a live
lease, behind what the reader had kept; a block that is kept is never written, and how the source's copy of it is does
not matter; every expect ends once; every block is let go of once, on both sides, or its read has truly never ended.
All that with handoffs in parts: what the source has not offered yet is noise, and nobody reads it.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from replicas.kv.handoff_actions import (
    BlocksDisputed,
    Event,
    HandoffArrived,
    HandoffTiming,
    KvLost,
    KvReady,
    LastPartArrived,
    LossReason,
    ReadReleased,
    SourceOutcome,
    SourceReleased,
)
from replicas.kv.transfer_driver import TransferDriver
from replicas.messages import Handoff, Token
from tests.replicas.fake_transport import FakeNetwork, FakeTransport, NetworkFaults, ReadFate

TIMING = HandoffTiming(lease_s=0.06, resend_s=0.005, max_resend_s=0.02, remember_s=0.3, quarantine_s=0.05)
STEP_S = 0.004
END_S = 0.6  # every deadline, lease and finite delay has passed by then
BLOCK_BYTES = 16
NUM_TRANSFERS = 3
BLOCKS_EACH = 4
NUM_BLOCKS = NUM_TRANSFERS * BLOCKS_EACH


class RandomFaults(NetworkFaults):
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.loss = rng.choice((0.0, 0.0, 0.1, 0.4))
        self.duplication = rng.choice((0.0, 0.3))
        self.delay_s = rng.choice((0.0, 0.003, 0.03))
        self.read_delay_s = rng.choice((0.0, 0.01, 0.05))
        self.read_failure = rng.choice((0.0, 0.0, 0.2))
        self.read_stuck = rng.choice((0.0, 0.0, 0.0, 0.2))
        self.read_unknown = rng.choice((0.0, 0.0, 0.0, 0.2))

    def _delay_s(self) -> float:
        return min(self.rng.expovariate(1 / self.delay_s), 0.2) if self.delay_s else 0.0

    def notification_delays_s(self, sender: str, receiver: str, payload: bytes) -> Sequence[float]:
        copies = 2 if self.rng.random() < self.duplication else 1
        return [self._delay_s() for _ in range(copies) if self.rng.random() >= self.loss]

    def read_fate(self, reader: str, source: str) -> ReadFate:
        if self.rng.random() < self.read_stuck:
            return ReadFate(math.inf)
        delay_s = self.rng.uniform(0, 2 * self.read_delay_s)
        is_known = self.rng.random() >= self.read_unknown
        return ReadFate(delay_s, succeeds=self.rng.random() >= self.read_failure, is_known=is_known)

    def probe_fate(self, reader: str, source: str) -> ReadFate:
        return self.read_fate(reader, source)


class World:
    """One source and one reader engine, and what they saw."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.time_s = 0.0
        self.faults = RandomFaults(rng)
        network = FakeNetwork(lambda: self.time_s, self.faults)
        self.network = network
        self.max_bytes_in_flight = rng.choice((1, BLOCKS_EACH * BLOCK_BYTES, 1 << 20))
        self.verify = rng.random() < 0.5
        self.holding = rng.choice((0.0, 0.02, 0.3))
        self.corruption = rng.choice((0.0, 0.3)) if self.verify else 0.0
        pool_bytes = NUM_BLOCKS * BLOCK_BYTES
        self.source_pool, self.reader_pool = bytearray(rng.randbytes(pool_bytes)), bytearray(rng.randbytes(pool_bytes))
        self.original, self.kept = bytes(self.source_pool), bytes(self.reader_pool)
        self.source_pool[:] = b"\xee" * pool_bytes  # computed when it is offered
        self.num_offered: Counter[str] = Counter()
        self.num_early = 0  # blocks that were read before the last part was offered
        self.source_ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.reader_ids = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.source_events: list[Event] = []
        self.reader_events: list[Event] = []
        self.reads_given: list[tuple[float, str]] = []  # when the reader's engine finds memory
        self.num_given: Counter[str] = Counter()
        self.num_kept = {str(number): rng.randint(0, BLOCKS_EACH) for number in range(NUM_TRANSFERS)}
        self.num_in = Counter(self.num_kept)  # blocks of each that are at the reader
        self.num_disputed = 0
        self.num_read = 0  # blocks of reads that succeeded
        self.corrupted: set[str] = set()
        self.source = self._driver("prefill", self.source_pool, self._on_source_event)
        self.reader = self._driver("decode", self.reader_pool, self._on_reader_event)

    def _driver(self, replica: str, pool: bytearray, on_event: object) -> TransferDriver:
        def digest(block_ids: Sequence[int]) -> bytes:
            pieces = [pool[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES] for block_id in block_ids]
            return b"".join(hashlib.blake2b(piece, digest_size=8).digest() for piece in pieces)

        return TransferDriver(
            FakeTransport(self.network, pool, BLOCK_BYTES, replica, "1"),
            on_event,  # type: ignore[arg-type]
            TIMING,
            self.max_bytes_in_flight,
            digest if self.verify else None,
            self,
            lambda: self.time_s,
        )

    # -- fault hooks of both drivers --

    def hold(self, point: str) -> bool:
        return self.rng.random() < self.holding

    def after_confirm(self, transfer_id: str, source_block_ids: Sequence[int]) -> None:
        assert tuple(source_block_ids) == self.ids(self.source_ids, transfer_id)

    def after_read(self, transfer_id: str, local_block_ids: Sequence[int]) -> None:
        ids, first = self.ids(self.reader_ids, transfer_id), self.num_in[transfer_id]
        assert tuple(local_block_ids) == ids[first : first + len(local_block_ids)], "each once, in order"
        self.num_in[transfer_id] += len(local_block_ids)
        assert self.num_in[transfer_id] <= self.num_offered[transfer_id]
        self.num_read += len(local_block_ids)
        if self.num_offered[transfer_id] < BLOCKS_EACH:
            self.num_early += len(local_block_ids)
        if self.rng.random() < self.corruption:
            self.corrupted.add(transfer_id)
            self.reader_pool[self.rng.choice(local_block_ids) * BLOCK_BYTES] ^= 1

    # -- the two engines --

    def ids(self, of: list[int], transfer_id: str) -> tuple[int, ...]:
        start = int(transfer_id) * BLOCKS_EACH
        return tuple(of[start : start + BLOCKS_EACH])

    def _on_source_event(self, event: Event) -> None:
        self.source_events.append(event)
        if isinstance(event, BlocksDisputed):
            read = self.ids(self.source_ids, event.transfer_id)[
                self.num_kept[event.transfer_id] : self.num_in[event.transfer_id]
            ]
            assert set(event.block_ids) <= set(read)
            self.num_disputed += 1
        if isinstance(event, SourceReleased):
            for block_id in self.ids(self.source_ids, event.transfer_id):  # somebody else's KV from now on
                self.source_pool[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES] = b"\xee" * BLOCK_BYTES

    def _on_reader_event(self, event: Event) -> None:
        self.reader_events.append(event)
        if isinstance(event, HandoffArrived):
            wait_s = self.rng.choice((0.0, 0.0, 0.02, 0.1))
            self.reads_given.append((self.time_s + wait_s, event.transfer_id))
        elif isinstance(event, KvReady):
            self._check_ready(event.transfer_id)

    def _check_ready(self, transfer_id: str) -> None:
        assert SourceReleased(transfer_id, SourceOutcome.CONFIRMED) in self.source_events
        assert ReadReleased(transfer_id) in self.reader_events
        assert transfer_id not in self.corrupted
        told = [e.handoff for e in self.reader_events if isinstance(e, HandoffArrived | LastPartArrived)
                and e.transfer_id == transfer_id]  # fmt: skip
        assert [handoff.is_last for handoff in told] in ([True], [False, True])
        assert told[-1].first_tokens == first_tokens(transfer_id)
        pairs = zip(self.ids(self.source_ids, transfer_id), self.ids(self.reader_ids, transfer_id), strict=True)
        for place, (source_id, reader_id) in enumerate(pairs):
            expected = self.original[source_id * BLOCK_BYTES : (source_id + 1) * BLOCK_BYTES]
            if place < self.num_kept[transfer_id]:
                expected = self.kept[reader_id * BLOCK_BYTES : (reader_id + 1) * BLOCK_BYTES]
            assert self.reader_pool[reader_id * BLOCK_BYTES : (reader_id + 1) * BLOCK_BYTES] == expected

    def check_kept(self) -> None:
        """No kept block was ever written, however its transfer ended."""
        for transfer_id, num_kept in self.num_kept.items():
            for block_id in self.ids(self.reader_ids, transfer_id)[:num_kept]:
                at = slice(block_id * BLOCK_BYTES, (block_id + 1) * BLOCK_BYTES)
                assert self.reader_pool[at] == self.kept[at]

    def start(self) -> list[tuple[float, str, str]]:
        """Expect and offer everything; the rest of the script as (time, action, transfer id)."""
        script: list[tuple[float, str, str]] = []
        for number in range(NUM_TRANSFERS):
            transfer_id = str(number)
            deadline_s = self.rng.uniform(0.02, 0.3)
            self.reader.expect(transfer_id, self.source.local_peer, 30, BLOCKS_EACH, deadline_s)
            at_s = 0.0
            for end in (*sorted(self.rng.sample(range(1, BLOCKS_EACH), self.rng.choice((0, 0, 1, 2, 3)))), BLOCKS_EACH):
                at_s += self.rng.uniform(0, 0.03)
                script.append((at_s, f"offer {end}", transfer_id))
            if self.rng.random() < 0.2:
                script.append((self.rng.uniform(0, 0.1), self.rng.choice(("cancel", "withdraw")), transfer_id))
        if self.rng.random() < 0.1:
            script.append((self.rng.uniform(0, 0.1), self.rng.choice(("source dies", "reader dies")), ""))
        return sorted(script)

    def act(self, action: str, transfer_id: str) -> None:
        match action.split():
            case ["offer", end]:
                self._offer(transfer_id, int(end))
            case ["cancel"]:
                self.reader.cancel(transfer_id)
            case ["withdraw"]:
                self.source.cancel(transfer_id)
            case ["source", "dies"]:
                self.network.kill("prefill-1")
                self.reader.forget_peer("prefill-1")
            case ["reader", "dies"]:
                self.network.kill("decode-1")
                self.source.forget_peer("decode-1")

    def _offer(self, transfer_id: str, end: int) -> None:
        """The next part, up to block `end`. As an engine, none when the transfer is known to have ended."""
        first = self.num_offered[transfer_id]
        was_released = any(e.transfer_id == transfer_id for e in self.source_events if isinstance(e, SourceReleased))
        if first and was_released and self.rng.random() < 0.5:  # else it learns of it too late
            return
        ids, is_last = self.ids(self.source_ids, transfer_id)[first:end], end == BLOCKS_EACH
        for block_id in () if was_released else ids:
            at = slice(block_id * BLOCK_BYTES, (block_id + 1) * BLOCK_BYTES)
            self.source_pool[at] = self.original[at]
        tokens = first_tokens(transfer_id) if is_last else ()
        handoff = Handoff(
            transfer_id, "1", "1", "fake", ids, 30, None, tokens, TIMING.lease_s, (), first, is_last
        )  # fmt: skip
        self.num_offered[transfer_id] = end
        self.source.offer(handoff, self.reader.local_peer, self.time_s + 0.3)
        for block_id in ids[: max(0, self.num_kept[transfer_id] - first)]:  # of which nobody needs the source's copy
            self.source_pool[block_id * BLOCK_BYTES] ^= 1

    def run(self) -> None:
        script = self.start()
        while self.time_s < END_S:
            self.time_s += STEP_S
            for driver in (self.source, self.reader):
                mail = driver.collect()
                while driver is self.source and script and script[0][0] <= self.time_s:
                    self.act(*script.pop(0)[1:])
                for due in [given for given in self.reads_given if driver is self.reader and given[0] <= self.time_s]:
                    self.reads_given.remove(due)
                    self.num_given[due[1]] += 1
                    self.reader.read_into(due[1], self.ids(self.reader_ids, due[1]), self.num_kept[due[1]])
                driver.advance(mail)
            pending = script or self.reads_given or self.reader.reads.in_flight
            if not pending and not self.source.is_busy and not self.reader.is_busy:
                break


def first_tokens(transfer_id: str) -> tuple[Token, ...]:
    return (Token(transfer_id, 0, 0, 7, None),)


def _of(events: list[Event], *kinds: type) -> Counter[str]:
    return Counter(event.transfer_id for event in events if isinstance(event, kinds))


def check_end(world: World) -> Counter[str]:
    """Everything ended once and nothing is held, except by reads that never end. Returns how they ended."""
    once = Counter({str(number): 1 for number in range(NUM_TRANSFERS)})
    assert _of(world.reader_events, KvReady, KvLost) == once
    assert _of(world.source_events, SourceReleased) == once
    assert world.source.source.num_open == world.reader.reader.num_open == 0
    released = _of(world.reader_events, ReadReleased)
    stuck = Counter(list(world.reader.reads.in_flight))
    assert released + stuck == world.num_given
    assert world.reader.reads.bytes_read == world.num_read * BLOCK_BYTES
    world.check_kept()
    assert world.reader.reader.num_quarantined(world.time_s) == len(stuck)
    if not world.faults.read_stuck and not world.faults.read_unknown:
        assert not stuck
    for driver in (world.source, world.reader):
        assert not set(driver.errors) - {"unreachable", "read", "probe", "disputed"}
    outcomes: Counter[str] = Counter({"disputed": world.num_disputed, "early": world.num_early})
    for event in [*world.reader_events, *world.source_events]:
        match event:
            case KvReady(transfer_id):
                outcomes["ready"] += 1
                outcomes[f"ready, {world.num_kept[transfer_id]} kept"] += 1
            case KvLost(_, reason, _):
                outcomes[reason] += 1
            case SourceReleased(_, outcome):
                outcomes[f"source {outcome}"] += 1
    return outcomes


@pytest.mark.parametrize("batch", range(10))
def test_random_networks(batch: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(batch * 200, batch * 200 + 200):
        world = World(seed)
        world.run()
        try:
            outcomes += check_end(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    # The runs must have visited the interesting ends, or the assertions above say little.
    assert outcomes["ready"] > 100
    assert outcomes["disputed"] > 0
    assert outcomes["early"] > 10
    assert all(outcomes[f"ready, {num_kept} kept"] > 10 for num_kept in range(BLOCKS_EACH + 1)), outcomes
    for reason in set(LossReason) - {LossReason.MISMATCH, LossReason.PEER_UNREACHABLE}:
        assert outcomes[reason] > 0, outcomes
    for outcome in (SourceOutcome.CONFIRMED, SourceOutcome.EXPIRED, SourceOutcome.DROPPED, SourceOutcome.CANCELLED):
        assert outcomes[f"source {outcome}"] > 0, outcomes


class LosesFirstCopies(NetworkFaults):
    """Of every message, the first copy that is sent is lost."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, bytes]] = set()

    def notification_delays_s(self, sender: str, receiver: str, payload: bytes) -> Sequence[float]:
        first = (sender, payload) not in self.seen
        self.seen.add((sender, payload))
        return () if first else (0.0,)


@pytest.mark.parametrize("step", [1, 2, BLOCKS_EACH], ids=["many parts", "parts", "whole"])
@pytest.mark.parametrize("num_kept", range(BLOCKS_EACH + 1))
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("make_faults", [NetworkFaults, LosesFirstCopies])
def test_a_patient_pair_loses_nothing(make_faults: type[NetworkFaults], verify: bool, num_kept: int, step: int) -> None:
    faults = make_faults()
    world = next(world for world in map(World, range(100)) if world.verify is verify)
    world.network.faults = faults
    world.corruption = world.holding = 0.0
    for number in range(NUM_TRANSFERS):
        world.num_kept[str(number)] = num_kept
        world.reader.expect(str(number), world.source.local_peer, 30, BLOCKS_EACH, 0.5)
        world.num_in[str(number)] = num_kept
    world.start = lambda: [  # type: ignore[method-assign]
        (0.02 * end, f"offer {end}", str(number)) for end in range(step, BLOCKS_EACH + 1, step)
        for number in range(NUM_TRANSFERS)
    ]  # fmt: skip
    world.run()
    early = world.num_early
    if make_faults is NetworkFaults:  # else what is sent again may be all there is
        assert (early > 0) == (num_kept < BLOCKS_EACH - step)
    ready = {"disputed": 0, "early": early, "ready": NUM_TRANSFERS, f"ready, {num_kept} kept": NUM_TRANSFERS}
    assert check_end(world) == {**ready, "source confirmed": NUM_TRANSFERS}
    assert world.num_read == NUM_TRANSFERS * (BLOCKS_EACH - num_kept)
