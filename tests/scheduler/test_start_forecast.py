"""Small requests behind a large one that waits for a larger one: who is over in time does not wait with it."""

from __future__ import annotations

import random

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import decode_scheduler, limits, make_request, sampled

BLOCK_SIZE = 4


def huge_in_front(scheduler: Scheduler, num_steps: int) -> tuple[Request, Request]:
    """One that runs for so many steps, and one that does not fit beside it. Together with a tiny one each fits."""
    runs, waits = make_request("runs", 120, num_steps + 1), make_request("waits", 280, 5)
    scheduler.submit(runs, 0.0)
    assert scheduler.admit(0.0) == (runs,)
    turn(scheduler, [])
    scheduler.submit(waits, 0.0)
    assert scheduler.admit(0.0) == ()
    return runs, waits


def turn(scheduler: Scheduler, admitted: list[str]) -> None:
    admitted += [request.request_id for request in scheduler.admit(0.0)]
    plan = scheduler.plan(0.0)
    if plan is not None:
        scheduler.commit(sampled(plan), 0.0)


def pool(max_overtakes: int = 8) -> Scheduler:
    size = limits(num_blocks=100, block_size=BLOCK_SIZE, max_sequences=40, max_step_tokens=512)
    return decode_scheduler(size, AdmissionPolicy(max_overtakes=max_overtakes))


def test_tiny_ones_do_not_wait_for_the_first_huge_one() -> None:
    """1 huge running, 1 huge waiting, 20 tiny: they are all over long before the second could start."""
    scheduler = pool()
    _, waits = huge_in_front(scheduler, 120)
    for number in range(20):
        scheduler.submit(make_request(f"tiny{number}", 4, 3), 0.0)
    admitted: list[str] = []
    for _ in range(40):
        turn(scheduler, admitted)
    assert admitted == [f"tiny{number}" for number in range(20)]
    assert scheduler.get("runs") is not None, "the first huge one runs still"
    assert waits.num_overtaken <= 8
    while "waits" not in admitted:
        turn(scheduler, admitted)
    assert scheduler.builder.next_step_id <= waits.starts_at + 1


@pytest.mark.parametrize(("max_tokens", "num_passed"), [(3, 20), (44, 5), (55, 2)])
def test_who_would_not_be_over_in_time_counts_as_ever(max_tokens: int, num_passed: int) -> None:
    """Of 44 tokens some are over in time, as long as there is room for them."""
    scheduler = pool(max_overtakes=2)
    huge_in_front(scheduler, 50)
    for number in range(20):
        scheduler.submit(make_request(f"r{number}", 1, max_tokens), 0.0)
    admitted: list[str] = []
    for _ in range(15):
        turn(scheduler, admitted)
    assert len(admitted) == num_passed


def test_with_no_overtaking_at_all_the_order_is_strict() -> None:
    scheduler = pool(max_overtakes=0)
    huge_in_front(scheduler, 60)
    scheduler.submit(make_request("tiny", 4, 3), 0.0)
    admitted: list[str] = []
    while not admitted:
        turn(scheduler, admitted)
    assert admitted == ["waits", "tiny"]


def test_a_newcomer_passes_one_that_has_begun_only_if_it_is_over_in_time() -> None:
    scheduler = pool()
    huge_in_front(scheduler, 80)
    scheduler.end("waits", RequestState.CANCELLED, 0.0)
    begun = make_request("begun", 280, 5)
    begun.has_begun = True
    scheduler.submit(begun, 0.0)
    scheduler.submit(make_request("long", 1, 90), 0.0)
    scheduler.submit(make_request("short", 1, 3), 0.0)
    admitted: list[str] = []
    while "begun" not in admitted:
        turn(scheduler, admitted)
    assert [name for name in admitted if name != "long"] == ["short", "begun"]
    assert "long" not in admitted[:2]
    assert begun.num_overtaken == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_flood_that_never_ends_does_not_keep_it_waiting(seed: int) -> None:
    """Whatever comes behind it: it is let in no later than was projected when it came, but for what counts."""
    rng = random.Random(seed)
    scheduler = pool(max_overtakes=rng.choice([1, 4, 8]))
    ends_early = rng.random() < 0.5
    runs, waits = huge_in_front(scheduler, rng.randint(40, 150))
    bound = scheduler.builder.next_step_id + 160
    counted_end = 0
    admitted: list[str] = []
    for number in range(400):
        while scheduler.num_queued < 12:
            tokens = rng.choice([2, 3, 8, rng.randint(1, 40)])
            scheduler.submit(make_request(f"r{number}.{scheduler.num_queued}", rng.randint(1, 12), tokens), 0.0)
        if ends_early and number == 20:
            scheduler.end("runs", RequestState.CANCELLED, 0.0)
        before = waits.num_overtaken
        turn(scheduler, admitted)
        if waits.num_overtaken > before:
            counted_end = scheduler.builder.next_step_id + 60
        if "waits" in admitted:
            break
    assert "waits" in admitted, "it starves"
    assert len(admitted) > 10
    assert scheduler.builder.next_step_id <= max(bound, counted_end)
    assert waits.num_overtaken <= scheduler._max_overtakes
    assert runs.is_over
