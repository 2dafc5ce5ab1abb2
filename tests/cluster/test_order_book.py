"""What a router knows of replicas on their way, of several pools, by what it is told from two sides."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.routing.order_book import OrderBook
from cluster.routing.replica_orders import Arrivals


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Shown:
    """The last figures of each pool."""

    def __init__(self) -> None:
        self.figures: dict[str, tuple[int, float]] = {}

    def on_their_way(self, pool: str, num_replicas: int, start_s: float) -> None:
        self.figures[pool] = num_replicas, start_s


def book(guess_s: float = 60.0, longest_wait_s: float = 300.0) -> tuple[OrderBook, Clock, Shown]:
    clock, shown = Clock(), Shown()
    orders = OrderBook(shown, longest_wait_s, clock)
    orders.expect({"decode": guess_s, "prefill": guess_s})
    return orders, clock, shown


def table(*names: str, start_s: float | None = None) -> dict[str, dict[str, Any]]:
    return {name: {} if start_s is None else {"start_s": start_s} for name in names}


def test_an_order_until_it_has_come_and_the_next_by_what_was_measured() -> None:
    orders, clock, shown = book()
    orders.present("decode", table("a"))
    orders.wanted({"decode": 1, "prefill": 0, "ingress": 5})
    assert orders.coming("decode") == Arrivals()
    assert shown.figures == {"decode": (0, 60.0), "prefill": (0, 60.0)}
    clock.now_s += 10
    orders.wanted({"decode": 2, "prefill": 0})
    assert orders.coming("decode") == Arrivals(1, 1070.0, 1130.0)
    assert shown.figures["decode"] == (1, 60.0)
    clock.now_s += 40
    orders.present("decode", table("a", "b"))
    assert orders.coming("decode") == Arrivals(last_came_s=1050.0)
    assert shown.figures["decode"] == (0, 40.0)
    assert (orders.start_s("decode"), orders.start_s("prefill")) == (40.0, 60.0)
    orders.wanted({"decode": 3})
    assert orders.coming("decode") == Arrivals(1, 1090.0, 1130.0, last_came_s=1050.0)
    assert orders.coming("prefill") == Arrivals()


def test_what_replicas_say_of_their_own_start_counts_until_one_was_measured() -> None:
    orders, clock, _ = book()
    orders.wanted({"decode": 2})
    orders.present("decode", table("a", start_s=200.0))
    assert orders.start_s("decode") == 200.0
    clock.now_s += 1.0
    orders.wanted({"decode": 3})
    clock.now_s += 250.0
    orders.present("decode", table("a", "b", "c", start_s=200.0))
    assert orders.start_s("decode") == 250.0


def test_nothing_is_known_of_a_pool_that_nobody_has_named() -> None:
    orders = OrderBook(Shown(), 300.0, Clock())
    orders.present("decode", table("a"))
    orders.wanted({"decode": 5})
    assert orders.coming("decode") == Arrivals()
    assert orders.start_s("decode") == 0.0
    orders.expect({"decode": 60.0})
    orders.wanted({"decode": 5})
    assert orders.coming("decode").num == 4


def test_another_guess_leaves_alone_what_was_measured() -> None:
    orders, clock, _ = book()
    orders.present("decode", table("a"))
    orders.wanted({"decode": 1})
    orders.wanted({"decode": 2})
    clock.now_s += 33.0
    orders.present("decode", table("a", "b"))
    orders.expect({"decode": 500.0, "prefill": 500.0})
    assert (orders.start_s("decode"), orders.start_s("prefill")) == (33.0, 500.0)


@pytest.mark.parametrize("how", ["told", "measured", "guessed"])
def test_a_start_that_takes_longer_than_anybody_waits_is_warned_of_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    orders, clock, _ = book(guess_s=70.0 if how == "guessed" else 10.0, longest_wait_s=60.0)
    for num in (1, 2, 3):
        orders.wanted({"decode": num})
        clock.now_s += 70.0 if how == "measured" else 5.0
        names = [f"{index}" for index in range(num)]
        orders.present("decode", table(*names, start_s=70.0 if how == "told" else None))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    expected = "a decode replica takes 70 s to start, requests wait at most ingress.cold_start_timeout_s, 60 s"
    assert warnings == ([] if how == "guessed" else [expected])
