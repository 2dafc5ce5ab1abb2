"""What is known of a pair's rate, and by how much probes measure it."""

from __future__ import annotations

import pytest

from replicas.kv.kv_transport import MAX_PROBE_BYTES
from replicas.kv.pair_rate import Pace, PairRate, PairRates
from replicas.kv.probe import LONGEST_READ_S, Probe
from replicas.messages import TransferPeer

PEER = TransferPeer("prefill-1", "e", "prefill-1-e", b"", "f", 1, 1)
NAME = PEER.agent_name
MIB = 1024**2
HELD_UP_S = 0.016  # seen where servers start on two cores: of one small read in twelve


def measured(
    bytes_per_s: float, latency_s: float, max_bytes: int = 1 << 40, held_up: tuple[int, ...] = ()
) -> tuple[PairRate, list[float]]:
    """What a probe says of such a pair, and how long its reads take. held_up: those that take HELD_UP_S more."""
    probe, took = Probe(max_bytes), []
    while probe.next_bytes is not None:
        took.append(latency_s + probe.next_bytes / bytes_per_s + (HELD_UP_S if len(took) in held_up else 0.0))
        probe.took(took[-1])
    rate = probe.rate("p")
    assert rate is not None
    return rate, took


@pytest.mark.parametrize("bytes_per_s", [2e6, 10e6, 0.5e9, 2e9, 40e9, 300e9])
def test_a_probe_finds_the_rate_without_the_latency_and_takes_no_longer_if_it_is_slow(bytes_per_s: float) -> None:
    rate, took = measured(bytes_per_s, 20e-6)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.02 if bytes_per_s < 10e9 else 0.35)
    assert max(took) <= LONGEST_READ_S
    assert sum(took) < 3 * LONGEST_READ_S


@pytest.mark.parametrize("held_up", [(1,), (2,), (1, 2), (2, 3), (5, 6)])
def test_a_read_that_a_busy_machine_held_up_is_no_rate(held_up: tuple[int, ...]) -> None:
    """A small one is made again, and a large one is late by a part."""
    rate, _ = measured(0.5e9, 1e-3, held_up=held_up)
    assert rate.bytes_per_s > 0.25e9


def test_one_card_reads_all_sizes_in_the_same_time() -> None:
    """0.33 ms each, measured: the largest says how fast it is at least."""
    rate, took = measured(600e9, 0.33e-3)
    assert len(took) == 7
    assert rate.bytes_per_s == pytest.approx(MAX_PROBE_BYTES / took[-1])
    assert rate.latency_s == pytest.approx(0.33e-3, rel=0.01)
    assert rate.pace is Pace.DEVICE


def test_what_tcp_between_cards_gives_is_told_from_cuda_ipc() -> None:
    rate, _ = measured(0.54e9, 0.3e-3)
    assert rate.pace is Pace.TCP
    assert measured(5e9, 0.1e-3)[0].pace is Pace.NETWORK


def test_a_probe_reads_no_more_than_there_is_and_not_once_only() -> None:
    probe = Probe(1000)
    assert probe.next_bytes == 1000
    probe.took(5.0)  # while the connection is made
    assert (probe.next_bytes, probe.num_bytes, probe.rate("p")) == (1000, 0, None)
    probe.took(0.001)
    assert (probe.next_bytes, probe.num_bytes) == (None, 1000)
    assert probe.rate("p") == PairRate("p", 1e6, 0.001)


def read(rates: PairRates, num_bytes: int, begun_s: float, ended_s: float) -> None:
    rates.began(NAME, True, begun_s)
    rates.ended(PEER, num_bytes, True, ended_s)


def test_reads_move_the_average() -> None:
    rates = PairRates()
    rates.measured(NAME, PairRate("prefill-1", 1e9, 0.001))
    for second in range(40):
        read(rates, 500 * MIB, second, second + 1.0)
    rate = rates.of(NAME)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(500 * MIB, rel=0.01)
    assert (rate.replica_id, rate.latency_s) == ("prefill-1", 0.001)


def test_short_reads_say_nothing_unless_they_are_fast() -> None:
    """Time is told by polls: 16 KiB in one poll are no 16 MB/s."""
    rates = PairRates()
    read(rates, 16 * 1024, 0.0, 0.001)
    assert rates.of(NAME) is None
    rates.measured(NAME, PairRate("prefill-1", 1e9))
    read(rates, 16 * 1024, 1.0, 1.001)
    assert rates.of(NAME) == PairRate("prefill-1", 1e9)
    read(rates, 100 * MIB, 2.0, 2.001)
    faster = rates.of(NAME)
    assert faster is not None
    assert faster.bytes_per_s == pytest.approx(0.8e9 + 0.2 * 100 * MIB / 0.001)


def test_few_bytes_count_little() -> None:
    """2 MiB whose end was seen late, as this process computed, are no news of the connection; many such are."""
    rates = PairRates()
    rates.measured(NAME, PairRate("prefill-1", 100e9))
    read(rates, 2 * MIB, 0.0, 0.01)
    rate = rates.of(NAME)
    assert rate is not None
    assert rate.bytes_per_s > 98e9
    for number in range(1, 1000):
        read(rates, 2 * MIB, number, number + 0.01)
    rate = rates.of(NAME)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(2 * MIB / 0.01, rel=0.01)


def test_reads_at_the_same_time_share_a_rate() -> None:
    """Four of 100 MB, begun together, that end after about a second: 400 MB/s, not 100."""
    rates = PairRates()
    for number in range(4):
        rates.began(NAME, number == 0, 0.0)
    for number in range(4):
        rates.ended(PEER, 100_000_000, number == 3, 0.90 + 0.02 * number)
    assert rates.of(NAME) == PairRate("prefill-1", 400e6 / 0.96)


def test_a_peer_that_is_read_from_all_the_time_is_known_too() -> None:
    """Two under way at any time, one ends every 0.3 s, for ever."""
    rates = PairRates()
    for number in range(100):
        rates.began(NAME, number == 0, 0.3 * number)
        if number > 1:
            rates.ended(PEER, 90_000_000, False, 0.3 * number + 0.001)
    rate = rates.of(NAME)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(300e6, rel=0.02)


def test_a_pair_without_a_probe_is_known_by_its_first_long_read() -> None:
    rates = PairRates()
    read(rates, 100 * MIB, 0.0, 0.2)
    assert rates.of(NAME) == PairRate("prefill-1", 500 * MIB)
    assert rates.slowest() == rates.of(NAME)
    rates.forget(NAME)
    rates.forget(NAME)
    assert (rates.slowest(), dict(rates.all())) == (None, {})


@pytest.mark.parametrize("held_up", range(3))
def test_a_pair_without_a_probe_is_not_known_by_a_small_read_that_was_held_up(held_up: int) -> None:
    """2 MiB take 6 ms here; and while the connection is made, or a busy machine does something else, 20 times as long.
    Who is told of 18 MB/s reads nothing there for minutes, and so never hears better."""
    rates = PairRates()
    for number in range(3):
        assert rates.of(NAME) is None
        read(rates, 2 * MIB, number, number + (0.12 if number == held_up else 0.006))
    rate = rates.of(NAME)
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(2 * MIB / 0.006)


def test_a_read_that_is_too_short_to_say_how_fast_a_pair_is_says_how_fast_it_is_at_least() -> None:
    rates = PairRates()
    read(rates, 2 * MIB, 0.0, 0.002)
    for number in range(1, 4):
        assert rates.of(NAME) is None
        read(rates, 2 * MIB, number, number + 0.1)
    assert rates.of(NAME) == PairRate("prefill-1", pytest.approx(2 * MIB / 0.002))
    rates.forget(NAME)
    read(rates, 2 * MIB, 9.0, 9.1)
    assert rates.of(NAME) is None, "another process has that name"


def test_a_read_that_took_no_time_changes_nothing() -> None:
    rates = PairRates()
    read(rates, MIB, 1.0, 1.0)
    assert rates.slowest() is None


def test_each_pair_has_its_turn() -> None:
    rates = PairRates()
    assert rates.in_turn() is None
    for name in ("p", "q", "r"):
        rates.measured(f"agent-{name}", PairRate(name, 1e9))
    told = [rates.in_turn() for _ in range(6)]
    assert sorted(rate.replica_id for rate in told if rate is not None) == ["p", "p", "q", "q", "r", "r"]
    assert told[:3] == told[3:]
    rates.forget("agent-q")
    assert {rate.replica_id for rate in (rates.in_turn(), rates.in_turn()) if rate is not None} == {"p", "r"}
