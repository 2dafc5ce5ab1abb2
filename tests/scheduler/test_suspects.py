"""One suspect at a time, beside requests that are none, until it shows that it harms nobody."""

from __future__ import annotations

import pytest

from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import STOP, decode_scheduler, limits, make_request, sampled


def suspect(request_id: str, max_tokens: int = 6) -> Request:
    request = make_request(request_id, max_tokens=max_tokens)
    request.is_suspect = request.has_begun = True
    return request


def submit(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.submit(request, 0.0)


def turn(scheduler: Scheduler, **tokens: int) -> str:
    """Who was let in."""
    admitted = scheduler.admit(0.0)
    plan = scheduler.plan(0.0)
    if plan is not None:
        scheduler.commit(sampled(plan, **tokens), 0.0)
    return "".join(request.request_id for request in admitted)


def test_the_next_one_is_let_in_when_the_last_has_got_past_its_first_row() -> None:
    scheduler = decode_scheduler(limits())
    submit(scheduler, suspect("a"), suspect("b"), suspect("c"), make_request("n"))
    assert [turn(scheduler) for _ in range(5)] == ["an", "", "b", "", "c"]


@pytest.mark.parametrize("ending", [RequestState.CANCELLED, RequestState.FAILED])
def test_one_that_has_gone_keeps_nobody_waiting(ending: RequestState) -> None:
    scheduler = decode_scheduler(limits())
    submit(scheduler, suspect("a"), suspect("b"), suspect("c"))
    assert turn(scheduler) == "a"
    scheduler.end("b", ending, 0.0)
    scheduler.end("a", ending, 0.0)
    assert turn(scheduler) == "c"


def test_one_that_ends_with_its_first_token() -> None:
    scheduler = decode_scheduler(limits())
    submit(scheduler, suspect("a"), suspect("b", 1), suspect("c", 1), suspect("d"))
    assert [turn(scheduler, a=STOP) for _ in range(4)] == ["a", "b", "c", "d"]


def test_newcomers_do_not_wait_for_it() -> None:
    """It is not in anybody's way, and nobody's passing counts against it."""
    scheduler = decode_scheduler(limits(num_blocks=100, max_sequences=40, max_step_tokens=64))
    last = suspect("z")
    submit(scheduler, suspect("a"), last, *[make_request(f"{number}") for number in range(9)])
    assert turn(scheduler) == "a012345678"
    assert last.num_overtaken == 0
    assert [turn(scheduler) for _ in range(2)] == ["", "z"]
