"""A reader measures each source when they first meet, by reads that nobody waits for and that hurt nobody."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace

import pytest

from replicas.kv.kv_transport import InvalidRead, KvTransport, PeerUnreachable, ReadHandle
from replicas.kv.pair_rate import Pace, PairRate
from replicas.kv.slowed_transport import SlowedTransport
from replicas.messages import TransferPeer
from tests.replicas import driver_rig
from tests.replicas.driver_rig import NUM_BLOCKS, Rig
from tests.replicas.fake_transport import NetworkFaults, ReadFate

BLOCK_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that pools are larger than the largest probe."""
    monkeypatch.setattr(driver_rig, "BLOCK_BYTES", BLOCK_BYTES)


class Network(NetworkFaults):
    """rate_of: by source's agent name, else `rate`. fate: of probes. num_probes: started, by source."""

    def __init__(self, rate: float = 1e9, fate: ReadFate | None = None) -> None:
        self.rate, self.fate = rate, fate or ReadFate()
        self.rate_of: dict[str, float] = {}
        self.num_probes: Counter[str] = Counter()
        self.num_reads = 0

    def bytes_per_s(self, reader: str, source: str) -> float:
        return self.rate_of.get(source, self.rate)

    def read_fate(self, reader: str, source: str) -> ReadFate:
        self.num_reads += 1
        return ReadFate()

    def probe_fate(self, reader: str, source: str) -> ReadFate:
        self.num_probes[source] += 1
        return self.fate


def rate_of(rig: Rig, source: int = 0) -> PairRate | None:
    return rig.reader.peers.rates.of(rig.sources[source].local_peer.agent_name)


@pytest.mark.parametrize("bytes_per_s", [10e6, 0.5e9, 20e9])
def test_a_pair_is_measured_when_it_meets_and_once(bytes_per_s: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = Network(bytes_per_s)
    rig = Rig(faults)
    rig.expect("a")
    rig.expect("b")
    rig.run(0.2, step_s=0.0001)
    rate = rate_of(rig)
    assert rate is not None
    assert rate.replica_id == "prefill-0"
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)
    assert rig.reader.peers.rates.slowest() == rate
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "transfer_pair_measured"]
    assert (line.peer, line.pace) == ("prefill-0", Pace.of(bytes_per_s))  # type: ignore[attr-defined]
    assert line.gb_per_s == pytest.approx(bytes_per_s / 1e9, rel=0.15)  # type: ignore[attr-defined]
    num_probes = faults.num_probes["prefill-0-1"]
    rig.expect("c")
    rig.run(0.2)
    assert faults.num_probes["prefill-0-1"] == num_probes, "once"
    assert rig.is_untouched, "nothing lands in blocks"


def test_a_pair_that_is_busy_from_the_start_is_told_of_by_its_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(Network(100e6))
    for number in range(4):  # one behind the other: never quiet
        rig.hand_over(str(number), tuple(range(number * 8, number * 8 + 8)))
    rig.run(1.0)
    rate = rate_of(rig)
    assert rate is not None
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "transfer_pair_measured"]
    assert line.probe_bytes == 0, "no probe had its quiet"  # type: ignore[attr-defined]
    assert line.gb_per_s == pytest.approx(0.1, rel=0.3)  # type: ignore[attr-defined]


def test_the_source_polls_often_while_it_is_measured_and_not_for_long() -> None:
    """Else what is emulated on its side (shared memory, TCP) would go at the pace of an idle thread's polls."""
    rig = Rig(Network())
    rig.expect("a")
    assert not rig.sources[0].is_busy
    rig.run(0.002)
    assert rig.sources[0].is_busy
    rig.run(0.5)
    assert not rig.sources[0].is_busy
    assert not rig.sources[0].errors
    assert not rig.reader.errors


def test_a_source_that_comes_back_is_measured_anew_and_the_old_one_forgotten() -> None:
    faults = Network(1e9)
    rig = Rig(faults)
    rig.expect("a")
    rig.run(0.2, step_s=0.0001)
    rig.network.kill("prefill-0-1")
    rig.reader.forget_peer("prefill-0-1")
    assert dict(rig.reader.peers.rates.all()) == {}
    faults.rate_of["prefill-0-2"] = 2e9
    rig.sources = [rig.new_source("prefill-0", "2")]
    rig.expect("b")
    rig.run(0.2, step_s=0.0001)
    rate = rate_of(rig)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(2e9, rel=0.15)
    assert set(rig.reader.peers.rates.all()) == {"prefill-0-2"}


def test_a_peer_that_has_gone_takes_its_rate_along() -> None:
    rig = Rig(Network())
    rig.expect("a")
    rig.run(0.2, step_s=0.0001)
    rig.reader.cancel("a")
    rig.network.kill("prefill-0-1")
    rig.sources.clear()
    rig.run(6.0, step_s=0.05)
    assert len(rig.reader.peers) == 0
    assert dict(rig.reader.peers.rates.all()) == {}


def failed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.reason for record in caplog.records if getattr(record, "event", "") == "transfer_probe_failed"]  # type: ignore[attr-defined]


def test_a_probe_that_fails_costs_its_figures_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(Network(1e9, ReadFate(succeeds=False)))
    rig.hand_over("a", tuple(range(16)))
    rig.run(0.2)
    assert rig.seen("a") == ["HandoffArrived", "ReadReleased", "KvReady"]
    assert failed(caplog) == ["the read: failed"]
    assert rig.reader.errors == {"probe": 1}
    assert rig.reader.num_landing == 0
    rate = rate_of(rig)
    assert rate is not None, "the read of 16 ms has told"
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.15)
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "transfer_pair_measured"]
    assert line.probe_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("fate", [ReadFate(math.inf), ReadFate(is_known=False)], ids=["it hangs", "in part"])
def test_a_probe_without_an_end_is_given_up_and_its_memory_stays(
    fate: ReadFate, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(Network(1e9, fate))
    rig.hand_over("a", (1,))
    rig.run(6.0, step_s=0.02)
    assert rig.seen("a") == ["HandoffArrived", "ReadReleased", "KvReady"]
    assert failed(caplog) == ["no end within 5 s" if math.isinf(fate.delay_s) else "the read: unknown"]
    assert not rig.reader.is_busy
    rig.reader.cancel_all()
    assert rig.reader.num_landing == 1, "what it writes into must not be given back"


def test_a_peer_that_dies_in_its_probe_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Network(1e6))
    rig.expect("a")
    rig.run(0.01)
    assert rig.reader.num_landing == 1
    rig.network.kill("prefill-0-1")
    rig.sources.clear()
    rig.run(0.01)
    assert failed(caplog) == ["the read: failed"]
    assert rig.reader.num_landing == 0


def test_a_peer_that_is_forgotten_in_its_probe_makes_room_for_the_next() -> None:
    faults = Network(1e9)
    faults.rate_of["prefill-0-1"] = 1e3
    rig = Rig(faults, num_sources=2)
    rig.expect("a")
    rig.expect("b", source=1)
    rig.run(0.01)
    assert faults.num_probes == {"prefill-0-1": 1}
    rig.reader.forget_peer("prefill-0-1")
    rig.run(0.2)
    assert rate_of(rig, 1) is not None
    assert rate_of(rig, 0) is None


def test_pairs_are_measured_one_after_another() -> None:
    faults = Network(1e9)
    rig = Rig(faults, num_sources=5)
    for number in range(5):
        rig.expect(f"t{number}", source=number)
    most = 0
    for _ in range(1000):
        rig.run(0.001)
        most = max(most, rig.reader.num_landing)
    assert most == 1
    rates = rig.reader.peers.rates.all()
    assert len(rates) == 5
    assert all(rate.bytes_per_s == pytest.approx(1e9, rel=0.3) for rate in rates.values())


def test_a_pair_that_is_read_from_is_measured_when_it_is_quiet() -> None:
    """A probe beside reads of KV would measure what they leave."""
    faults = Network(1e9)
    rig = Rig(faults)
    rig.reader.peers.load(rig.sources[0].local_peer)
    rig.reader.peers.prober.meet(rig.sources[0].local_peer)
    rig.hand_over("a", (1,))  # 1 ms: too short to say anything
    assert not faults.num_probes or rig.reader.peers.prober.num_in_flight
    rig.run(0.3, step_s=0.0001)
    rate = rate_of(rig)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.15)


def test_a_source_of_another_model_is_not_measured() -> None:
    faults = Network()
    rig = Rig(faults)
    other = replace(rig.sources[0].local_peer, fingerprint="another")
    rig.reader.expect("a", other, 4, 1, rig.time_s + 1.0)
    rig.run(0.1)
    assert rig.seen("a") == ["KvLost"]
    assert not faults.num_probes


class WithoutProbes(SlowedTransport):
    """Its memory for probes can't be had."""

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        raise MemoryError("CUDA out of memory")


def test_a_probe_that_raises_is_told_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Network(), wrap=lambda transport: WithoutProbes(transport, lambda: None))
    rig.hand_over("a", (1,))
    rig.run(0.2)
    assert rig.seen("a") == ["HandoffArrived", "ReadReleased", "KvReady"]
    assert failed(caplog) == ["CUDA out of memory"]


def test_more_than_a_pool_has_is_refused() -> None:
    rig = Rig(Network())
    transport = rig.reader._transport
    peer = rig.sources[0].local_peer
    with pytest.raises(PeerUnreachable):
        transport.start_probe(peer, 1)
    transport.load_peer(peer)
    for num_bytes in (0, -1, NUM_BLOCKS * BLOCK_BYTES + 1, 33 << 20):
        with pytest.raises(InvalidRead):
            transport.start_probe(peer, num_bytes)


# -- a transport made slow ---------------------------------------------------------------------------------------------


def slowed(bytes_per_s: list[float | None], rig_of: list[Rig]) -> Rig:
    def wrap(transport: KvTransport) -> KvTransport:
        return SlowedTransport(transport, lambda: bytes_per_s[0], lambda: rig_of[0].time_s if rig_of else 100.0)

    rig_of.append(rig := Rig(Network(math.inf), wrap=wrap))
    return rig


def test_a_slowed_transport_is_measured_as_what_it_is_and_reads_take_as_long() -> None:
    rig = slowed([0.5e9], [])
    rig.expect("meet")
    rig.run(0.3, step_s=0.0001)
    rate = rate_of(rig)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(0.5e9, rel=0.1)
    for number in range(3):
        rig.hand_over(f"t{number}", tuple(range(16 * number, 16 * number + 16)))
    begun_s = rig.time_s - 100.0
    rig.run(0.2)
    each_s = 16 * BLOCK_BYTES / 0.5e9
    for number in range(3):
        took_s = rig.when("KvReady", f"t{number}") - begun_s
        assert took_s == pytest.approx((number + 1) * each_s, abs=0.012)
    assert rig.reader_pool == b"\x07" * len(rig.reader_pool)
    assert rig.sources[0].source.num_open == 0


def test_the_source_keeps_its_blocks_for_as_long_as_a_slowed_read_takes() -> None:
    rig = slowed([1e6], [])
    rig.hand_over("t", (1,))
    rig.run(0.5)
    assert rig.sources[0].source.num_open == 1, "its word that the read has ended is not sent early"
    assert rig.is_untouched
    rig.run(1.0)
    assert rig.seen("t")[-1] == "KvReady"


def test_what_is_not_slowed_is_as_it_was_and_may_be_slowed_any_time(caplog: pytest.LogCaptureFixture) -> None:
    bytes_per_s: list[float | None] = [None]
    rig = slowed(bytes_per_s, [])
    rig.hand_over("a", tuple(range(8)))
    rig.run(0.005)
    assert rig.seen("a")[-1] == "KvReady"
    bytes_per_s[0] = 80e6
    rig.hand_over("b", tuple(range(8)))
    rig.run(0.08)
    assert rig.seen("b")[-1] != "KvReady"
    rig.run(0.05)
    assert rig.seen("b")[-1] == "KvReady"
    bytes_per_s[0] = None
    rig.hand_over("c", tuple(range(8)))
    rig.run(0.005)
    assert rig.seen("c")[-1] == "KvReady"
    told = [record.bytes_per_s for record in caplog.records if getattr(record, "event", "") == "reads_slowed"]  # type: ignore[attr-defined]
    assert told == [80e6, None]


def test_a_source_that_dies_before_a_slowed_read_is_posted_fails_it() -> None:
    rig = slowed([1e6], [])
    rig.hand_over("t", (1,))
    transport = rig.reader._transport
    handle = rig.reader.reads.in_flight["t"].handle
    with pytest.raises(ValueError, match="not been posted"):
        transport.release_read(handle)
    rig.network.kill("prefill-0-1")
    rig.sources.clear()
    rig.run(2.0)
    assert rig.seen("t") == ["HandoffArrived", "ReadReleased", "KvLost"]
    assert rig.reader.num_landing == 0
