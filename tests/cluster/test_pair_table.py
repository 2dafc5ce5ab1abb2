"""What a router knows of pairs: rates, what is on its way, failures; and how all that fades."""

from __future__ import annotations

import logging

import pytest

from cluster.policies.routing_policy import Pair, Route, RouteKind
from cluster.routing.avoided_pairs import AvoidedPairs
from cluster.routing.pair_health import PairHealth
from cluster.routing.pair_table import PairTable

ROUTE = Route(RouteKind.REMOTE, "d", "p", must_wait=False, decode_blocks=1)
LOCAL = Route(RouteKind.SLOW_PAIR, "d", None, must_wait=False, decode_blocks=1, avoided_id="p")


class Table(PairTable):
    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(lambda: self.now_s)

    @property
    def pair(self) -> Pair:
        return self.of("d", "p")


def test_nothing_is_known_at_first_and_nothing_is_kept_of_local_prompts() -> None:
    table = Table()
    for told in (table.worked, table.failed):
        told(LOCAL)
    table.sent(LOCAL, 5)
    table.arrived(LOCAL, 5)
    assert table.pair == Pair(0.0, 0, 0.0)


def test_what_is_on_its_way() -> None:
    table = Table()
    table.sent(ROUTE, 100)
    table.sent(ROUTE, 20)
    assert table.pair.coming_tokens == 120
    assert table.of("d", "q") == table.of("e", "p") == Pair()
    table.arrived(ROUTE, 100)
    assert table.pair.coming_tokens == 20
    table.arrived(ROUTE, 20)
    with pytest.raises(AssertionError, match="arrived twice"):
        table.arrived(ROUTE, 20)


def test_a_rate_that_nothing_confirms_is_believed_less_and_less() -> None:
    """So that a pair that was slow is tried again."""
    table = Table()
    table.measured("d", [("p", 1e9), ("q", 5e9)])
    assert (table.pair.bytes_per_s, table.of("d", "q").bytes_per_s) == (1e9, 5e9)
    table.now_s += 60.0
    assert table.pair.bytes_per_s == 2e9
    table.measured("d", [("p", 1e9)])  # said once more, not measured
    assert table.pair.bytes_per_s == 2e9
    table.measured("d", [("p", 1.1e9)])
    assert table.pair.bytes_per_s == 1.1e9
    table.now_s += 60.0
    table.sent(ROUTE, 1)
    table.worked(ROUTE)
    assert table.pair.bytes_per_s == 1.1e9, "a read has gone, and the rate is what it was"
    table.now_s += 1e9
    assert table.pair.bytes_per_s == pytest.approx(1.1e9 * 1024), "no overflow"


def test_a_figure_of_this_moment_is_looked_up_not_made() -> None:
    table = Table()
    table.measured("d", [("p", 1e9)])
    assert table.pair is table.pair


def test_a_failure_counts_less_and_less() -> None:
    table = Table()
    table.failed(ROUTE)
    assert table.pair.penalty_s == 10.0
    table.now_s += 10.0
    assert table.pair.penalty_s == 5.0
    table.failed(ROUTE)
    assert table.pair.penalty_s == 15.0
    for _ in range(50):
        table.failed(ROUTE)
    assert table.pair.penalty_s == 60.0
    table.now_s += 160.0
    assert table.pair.penalty_s == 0.0


def test_whoever_tries_a_pair_that_has_failed_tries_it_alone() -> None:
    """Else all that come until the trial ends would meet the same fault."""
    table = Table()
    table.failed(ROUTE)
    table.now_s += 110.0
    assert table.pair.penalty_s < 0.01
    table.sent(ROUTE, 5)
    assert table.pair.penalty_s == 60.0
    table.arrived(ROUTE, 5)
    assert table.pair.penalty_s < 0.01, "it has ended and nothing has been said"
    table.sent(ROUTE, 5)
    table.worked(ROUTE)
    assert table.pair.penalty_s < 0.01, "it works: others may follow"


def test_a_pair_that_works_at_times_is_not_well() -> None:
    health = PairHealth()
    for second in range(100):
        now_s = float(second)
        health = health.failed(now_s) if second % 2 else health.worked(now_s)
    assert health.cost_s(100.0, is_in_use=False) > 1.0


def test_pairs_of_replicas_that_have_left_are_forgotten() -> None:
    table = Table()
    table.measured("d", [("p", 1e9), ("q", 1e9)])
    table.sent(ROUTE, 7)
    table.left({"d", "q"})
    assert table.pair == Pair(1e9, 7)
    table.arrived(ROUTE, 7)
    table.left({"d", "q"})
    assert (table.pair, table.of("d", "q").bytes_per_s) == (Pair(), 1e9)


def test_avoided_pairs_are_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    avoided = AvoidedPairs(lambda: table.now_s)
    table.measured("d", [("p", 5e8)])
    with caplog.at_level(logging.INFO, "cluster.routing.avoided_pairs"):
        for second in range(70):
            table.now_s = 1000.0 + second
            avoided.note(LOCAL, table)
            avoided.note(ROUTE, table)
            avoided.note(Route(RouteKind.BUSY_PREFILL, "d", None, False, 1, avoided_id="p"), table)
    first, second_line = caplog.records
    said = {name: getattr(first, name) for name in ("event", "why", "decode", "prefill")}
    assert said == {"event": "pair_avoided", "why": "local_slow_pair", "decode": "d", "prefill": "p"}
    assert (first.num_before, second_line.num_before) == (0, 59)


def test_kv_that_does_not_come_makes_its_way_dear_before_anybody_has_given_up() -> None:
    table = Table()
    for _ in range(2):
        table.sent(ROUTE, 10)
    table.now_s += 20.0
    assert table.pair.penalty_s == 0.0, "their prompts wait for the prefill replica: that is no fault of the way"
    for _ in range(2):
        table.reading(ROUTE)
    table.now_s += 4.9
    assert table.pair.penalty_s == 0.0
    table.now_s += 3.1
    assert table.pair.penalty_s == 8.0
    table.arrived(ROUTE, 10, was_reading=True)
    table.worked(ROUTE)
    table.now_s += 1.0
    assert table.pair.penalty_s == 0.0, "it is slow, but KV comes"
    table.now_s += 9.0
    assert table.pair.penalty_s == 10.0
    table.arrived(ROUTE, 10, was_reading=True)
    table.now_s += 1.0
    assert table.pair.penalty_s == 0.0
