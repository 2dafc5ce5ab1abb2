"""Replicas on their way, how long a start takes, and how long who waits for them does: decisions as tables."""

from __future__ import annotations

import pytest

from cluster.routing.replica_orders import Arrivals, ReplicaOrders, StartTime, arrivals, waits_until

START = StartTime(guess_s=60.0)
Look = tuple[float, int | None, str]  # when, the target, who is there


def after(*looks: Look) -> tuple[ReplicaOrders, list[float | None]]:
    """What is on its way in the end, and how long each start took."""
    orders, took = ReplicaOrders(), list[float | None]()
    for now_s, target, present in looks:
        orders, came = orders.seen(now_s, target, present.split())
        took += came
    return orders, took


@pytest.mark.parametrize(
    ("looks", "ordered_s", "took"),
    [
        ([(0, 1, "a")], [], []),
        ([(0, 1, "a"), (5, 3, "a")], [5, 5], []),
        ([(0, 1, "a"), (5, 2, "a"), (9, 3, "a")], [5, 9], []),
        ([(0, 1, "a"), (5, 3, "a"), (70, 3, "a b")], [5], [65]),
        ([(0, 1, "a"), (5, 2, "a"), (9, 3, "a"), (70, 3, "a b c")], [], [65, 61]),
        # Withdrawn: the youngest.
        ([(0, 1, "a"), (5, 2, "a"), (9, 3, "a"), (20, 2, "a")], [5], []),
        ([(0, 1, "a"), (5, 3, "a"), (20, 1, "a")], [], []),
        # More came than were seen ordered.
        ([(0, 1, "a"), (5, 1, "a b")], [], []),
        # One dies, and is replaced.
        ([(0, 2, "a b"), (30, 2, "a"), (80, 2, "a c")], [], [50]),
        # One that comes takes the place of one that dies at the same time: it was ordered before.
        ([(0, 2, "a b"), (5, 3, "a b"), (60, 3, "a c")], [60], [55]),
        # Off the table for a moment, and back: no start, while another is one.
        ([(0, 2, "a b"), (30, 2, "a"), (31, 2, "a b")], [], []),
        ([(0, 2, "a b"), (5, 3, "a b"), (30, 3, "a"), (31, 3, "a b"), (70, 3, "a b c")], [], [65]),
        # A rolling update of two, one after the other.
        ([(0, 2, "a b"), (10, 2, "b"), (50, 2, "b c"), (51, 2, "c"), (95, 2, "c d")], [], [40, 44]),
        # From zero, and to it.
        ([(0, 0, ""), (3, 1, ""), (40, 1, "a"), (99, 0, "a"), (100, 0, "")], [], [37]),
        # Ordered before anybody looked: nobody knows when, but it is waited for.
        ([(0, 2, "a")], [0], []),
        ([(0, 2, "a"), (7, 2, "a b")], [], [None]),
        # The target is not known yet.
        ([(0, None, "a"), (7, None, "a b")], [], []),
        ([(0, None, ""), (2, None, "a"), (7, 2, "a"), (9, 2, "a b")], [], [None]),
    ],
)
def test_who_is_on_the_way(looks: list[Look], ordered_s: list[float], took: list[float | None]) -> None:
    orders, found = after(*looks)
    assert ([order.at_s for order in orders.orders], found) == (ordered_s, took)


@pytest.mark.parametrize(
    ("start", "expected_s", "longest_s"),
    [
        (START, 60, 120),
        (StartTime(60.0, told_s=20.0), 60, 120),  # from its process on: less than the whole
        (StartTime(60.0, told_s=400.0), 400, 800),
        (START.measured(73.0), 73, 146),
        (StartTime(60.0, told_s=400.0).measured(410.0).measured(405.0), 410, 820),
        (START.measured(10.0), 10, 60),  # quick by chance: the guess is waited for all the same
        (START.measured(500.0).measured(50.0).measured(40.0).measured(45.0).measured(44.0), 50, 100),
    ],
)
def test_how_long_a_start_takes(start: StartTime, expected_s: float, longest_s: float) -> None:
    assert (start.expected_s, start.longest_s) == (expected_s, longest_s)


@pytest.mark.parametrize(
    ("now_s", "looks", "expected"),
    [
        (5, [(0, 1, "a")], Arrivals()),
        (6, [(0, 1, "a"), (5, 3, "a")], Arrivals(2, 65, 125)),
        (80, [(0, 1, "a"), (5, 2, "a"), (9, 3, "a")], Arrivals(2, 80, 129)),
        (126, [(0, 1, "a"), (5, 2, "a"), (9, 3, "a")], Arrivals(1, 126, 129, 1)),
        (130, [(0, 1, "a"), (5, 2, "a"), (9, 3, "a")], Arrivals(0, 0, 0, 2)),
    ],
)
def test_what_may_be_hoped_for(now_s: float, looks: list[Look], expected: Arrivals) -> None:
    assert arrivals(now_s, after(*looks)[0], START) == expected


@pytest.mark.parametrize(
    ("coming", "until_s"),
    [
        (Arrivals(), 130),  # nobody comes: as ever
        (Arrivals(1, 165, 225), 225),  # as long as the start may take
        (Arrivals(1, 101, 111), 130),  # never shorter
        (Arrivals(num_overdue=1), 130),
        (Arrivals(last_came_s=50.0), 130),  # before it came
        (Arrivals(last_came_s=173.0), 400),  # it is to have a part of what has come
        (Arrivals(1, 165, 225, last_came_s=173.0), 400),
        (Arrivals(last_came_s=390.0), 420),  # not only until a moment later
        (Arrivals(1, 500, 900), 430),  # not for ever
        (Arrivals(last_came_s=425.0), 430),
    ],
)
def test_how_long_one_waits(coming: Arrivals, until_s: float) -> None:
    assert waits_until(100.0, 30.0, 300.0, coming) == until_s


def test_a_queue_timeout_that_is_longer_than_any_wait_for_a_start_holds() -> None:
    assert waits_until(0.0, 500.0, 300.0, Arrivals()) == 500.0
    assert waits_until(0.0, 500.0, 300.0, Arrivals(1, 60, 120)) == 500.0
