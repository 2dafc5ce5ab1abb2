"""Prompts of several chunks are handed over in parts: which blocks, when, and who lets go of them."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.capabilities import PREFILL
from scheduler.outcome import PromptPart, StepEvents
from scheduler.plan import StepPlan
from scheduler.prefix_book import PrefixOptions
from scheduler.request import RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import ALL_ABLE, STOP, limits, make_request, prefill_scheduler, sampled


def at_baseline(scheduler: Scheduler) -> bool:
    scheduler.allocator.check_integrity()
    return scheduler.ledger() == Scheduler(scheduler.limits, scheduler.capabilities).ledger()


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def parts_of(scheduler: Scheduler, token_id: int = 7) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Run steps until nothing is left to compute: blocks of the parts, and of the prompts, as they were told of."""
    parts: list[tuple[int, ...]] = []
    prompts: list[tuple[int, ...]] = []
    while (plan := scheduler.plan(0.0)) is not None:
        events = scheduler.commit(sampled(plan, token_id), 0.0)
        parts += [part.block_ids for part in events.parts]
        prompts += [done.block_ids for done in events.prompts]
    return parts, prompts


@pytest.mark.parametrize(
    ("prompt_len", "step_tokens", "parts"),
    [
        (16, 16, []),
        (16, 8, [(0, 1)]),
        (17, 8, [(0, 1), (2, 3)]),  # the last block is never in a part that is not the last
        (16, 5, [(0,), (1,), (2,)]),
        (10, 3, [(0,), (1,)]),  # a chunk that fills no block is no part
        (4, 3, []),
    ],
)
def test_blocks_of_finished_chunks_are_handed_over_before_the_prompt_is_done(
    prompt_len: int, step_tokens: int, parts: list[tuple[int, ...]]
) -> None:
    scheduler = prefill_scheduler(limits(max_step_tokens=step_tokens))
    scheduler.submit(make_request(prompt_len=prompt_len, hands_over=True), 0.0)
    scheduler.admit(0.0)
    whole = tuple(range(-(-prompt_len // 4)))
    assert parts_of(scheduler) == (parts, [whole])
    assert scheduler.ledger().blocks.transfer_only == len(whole)
    scheduler.lease_ended("r", 1.0)
    assert at_baseline(scheduler)


def test_nothing_is_handed_over_of_a_chunk_whose_step_is_in_flight() -> None:
    scheduler = prefill_scheduler(limits(max_step_tokens=8), lag=1)
    scheduler.submit(make_request(prompt_len=24, hands_over=True), 0.0)
    scheduler.admit(0.0)
    plans = [planned(scheduler), planned(scheduler), planned(scheduler)]
    assert scheduler._transfers == {}
    told = [scheduler.commit(sampled(plan), 0.0).parts for plan in plans]
    assert told == [(PromptPart("r", (0, 1)),), (PromptPart("r", (2, 3)),), ()]
    scheduler.lease_ended("r", 1.0)
    assert at_baseline(scheduler)


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 1}, {"hands_over": False}], ids=["nothing to decode", "decoded here"]
)
def test_what_nobody_will_read_comes_in_no_parts(changes: dict[str, Any]) -> None:
    scheduler = Scheduler(limits(max_step_tokens=8, max_sequences=4), ALL_ABLE)
    scheduler.submit(make_request(**{"prompt_len": 16, "max_tokens": 2, "hands_over": True, **changes}), 0.0)
    scheduler.admit(0.0)
    for _ in range(2):
        assert scheduler.commit(sampled(planned(scheduler)), 0.0).parts == ()
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    assert at_baseline(scheduler)


def test_a_transfer_that_ends_between_parts_ends_alone_and_the_blocks_stay_the_prompts() -> None:
    scheduler = prefill_scheduler(limits(max_step_tokens=8))
    request = make_request(prompt_len=24, hands_over=True)
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    assert scheduler.commit(sampled(planned(scheduler)), 0.0).parts == (PromptPart("r", (0, 1)),)
    plan = planned(scheduler)
    scheduler.lease_ended("r", 0.5)
    assert request.state is RequestState.PREFILLING
    scheduler.end("r", RequestState.FAILED, 0.5)  # as the engine does
    assert scheduler.allocator.counts().request == 6, "a step in flight computes on them"
    assert scheduler.commit(sampled(plan), 0.5) == StepEvents()
    assert at_baseline(scheduler)


def test_a_prompt_that_ends_while_a_part_is_read_leaves_that_part_to_the_transfer() -> None:
    scheduler = prefill_scheduler(limits(max_step_tokens=8))
    scheduler.submit(make_request(prompt_len=24, hands_over=True), 0.0)
    scheduler.admit(0.0)
    scheduler.commit(sampled(planned(scheduler)), 0.0)
    scheduler.end("r", RequestState.CANCELLED, 0.5)
    ledger = scheduler.ledger()
    assert (ledger.blocks.transfer_only, ledger.promised_blocks, ledger.used_slots) == (2, 2, 0)
    scheduler.lease_ended("r", 1.0)
    assert at_baseline(scheduler)


def test_a_prompt_that_stops_with_its_first_token_waits_for_the_reader_of_its_parts() -> None:
    """Its reader's router is told by the first token, and has it let go: the source does not end what it may read."""
    scheduler = prefill_scheduler(limits(max_step_tokens=8))
    request = make_request(prompt_len=20, hands_over=True)
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    assert parts_of(scheduler, STOP) == ([(0, 1), (2, 3)], [()])
    assert request.state is RequestState.FINISHED
    assert scheduler.ledger().blocks.transfer_only == scheduler.budget.promised == 4
    scheduler.lease_ended("r", 1.0)
    assert at_baseline(scheduler)


def test_what_was_found_goes_with_the_first_part() -> None:
    """It makes no part by itself: a prompt with one chunk left has none."""
    scheduler = Scheduler(limits(max_step_tokens=8), PREFILL, prefixes=PrefixOptions("f"))
    for request_id, length, expected in (
        ("first", 13, [2]),
        ("one chunk", 20, []),
        ("two chunks", 32, [7]),
    ):
        scheduler.submit(make_request(request_id, length, hands_over=True), 0.0)
        scheduler.admit(0.0)
        parts, ((*whole,),) = parts_of(scheduler)
        assert [len(part) for part in parts] == expected
        assert [block_id for part in parts for block_id in part] == whole[: sum(map(len, parts))]
        scheduler.lease_ended(request_id, 1.0)
