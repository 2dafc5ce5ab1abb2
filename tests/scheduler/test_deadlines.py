"""Deadlines against a plain dict."""

from __future__ import annotations

import random

import pytest

from scheduler.deadlines import Deadlines


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_match_a_plain_dict(seed: int) -> None:
    rng = random.Random(seed)
    deadlines, expected, now_s = Deadlines(), dict[str, float](), 0.0
    for _ in range(500):
        match rng.choice(["add", "discard", "wait"]):
            case "add":
                request_id = f"r{rng.randrange(30)}"
                if request_id not in expected:
                    expected[request_id] = now_s + rng.choice([0.0, 1.0, rng.uniform(-1, 20)])
                    deadlines.add(request_id, expected[request_id])
            case "discard":
                request_id = f"r{rng.randrange(30)}"
                deadlines.discard(request_id)
                expected.pop(request_id, None)
            case "wait":
                now_s += rng.random()
                due = deadlines.pop_due(now_s)
                assert set(due) == {request_id for request_id, at_s in expected.items() if at_s <= now_s}
                times = [expected.pop(request_id) for request_id in due]
                assert times == sorted(times)
        assert len(deadlines) == len(expected)
        assert deadlines.next_s == min(expected.values(), default=None)


def test_an_id_that_comes_again_has_its_new_deadline() -> None:
    deadlines = Deadlines()
    deadlines.add("r", 1.0)
    deadlines.discard("r")
    deadlines.add("r", 5.0)
    assert deadlines.next_s == 5.0
    assert deadlines.pop_due(4.0) == ()
    assert deadlines.pop_due(5.0) == ("r",)
    assert deadlines.pop_due(9.0) == ()


def test_memory_follows_the_live_ones() -> None:
    deadlines = Deadlines()
    deadlines.add("long", 1e9)
    for number in range(10_000):
        deadlines.add(f"r{number}", 600.0 + number)
        deadlines.discard(f"r{number}")
    assert len(deadlines._heap) < 100
    assert deadlines.next_s == 1e9
