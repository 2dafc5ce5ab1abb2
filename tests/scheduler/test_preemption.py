"""Who gives way, where the blocks go and when they are free again, step by step."""

from __future__ import annotations

import itertools

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import decode_scheduler, limits, make_request, running, sampled, step

SHORT = AdmissionPolicy(quantile=0.5, min_samples=1)


def optimist(num_blocks: int, num_host_blocks: int = 20, lag: int = 0) -> Scheduler:
    """Takes every output to be two tokens long."""
    scheduler = decode_scheduler(limits(num_blocks=num_blocks, max_sequences=8), SHORT, lag, num_host_blocks)
    for _ in range(50):
        scheduler.budget.choice_ended(2)
    return scheduler


def load(
    scheduler: Scheduler, name: str, priority: int = 0, choices: tuple[int, ...] = (0,), max_tokens: int = 17
) -> Request:
    """Running, two blocks of four tokens full: its next row takes one more block for each choice."""
    request = make_request(name, 8, max_tokens, choices, local_prefill=False, priority=priority)
    return running(scheduler, request)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0), "b"), ((0, 5), "a"), ((1, 1), "b"), ((-1, 0), "a")])
def test_the_youngest_of_the_lowest_priority_gives_way(priorities: tuple[int, int], victim: str) -> None:
    scheduler = optimist(num_blocks=7)
    requests = {name: load(scheduler, name, priority) for name, priority in zip("ab", priorities, strict=True)}
    for _ in range(4):
        step(scheduler)
    assert scheduler.allocator.num_free == 1
    plan, _ = step(scheduler)
    assert requests[victim].state is RequestState.PREEMPTED
    assert len(plan.swap_outs) == 3
    assert [row.request_id for row in plan.rows] == ["ab".replace(victim, "")]


def test_blocks_are_free_when_the_step_that_reads_them_is_committed() -> None:
    scheduler = optimist(num_blocks=6, lag=1)
    for name in "ab":
        load(scheduler, name)
    first = [planned(scheduler) for _ in range(4)]
    out = planned(scheduler)
    assert len(out.swap_outs) == 3
    assert {row.request_id for row in out.rows} == set(), "the other one waits: no block is free before the commit"
    assert scheduler.num_stalls == 1
    for plan in first:
        scheduler.commit(sampled(plan), 0.0)
    assert scheduler.allocator.num_free == 0
    scheduler.commit(sampled(out), 0.0)
    assert scheduler.allocator.num_free == 3
    assert {row.request_id for row in planned(scheduler).rows} == {"a"}


def test_forked_sequences_share_there_and_back() -> None:
    scheduler = optimist(num_blocks=9)
    load(scheduler, "a")
    forked = load(scheduler, "b", choices=(0, 1, 2), max_tokens=9)
    for _ in range(4):
        step(scheduler)
    plan, _ = step(scheduler)
    assert forked.state is RequestState.PREEMPTED
    assert len(plan.swap_outs) == 2 + 3, "two of the prompt, once, and one for each choice"
    assert scheduler.preemption.num_host_blocks_used == 5
    scheduler.end("a", RequestState.CANCELLED, 0.0)
    plan, _ = step(scheduler)
    assert forked.state is RequestState.RUNNING
    assert {swap.host for swap in plan.swap_ins} == {0, 1, 2, 3, 4}
    tables = [sequence.block_ids for sequence in forked.sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert len({row.choice for row in plan.rows}) == 3
    assert scheduler.preemption.num_host_blocks_used == 0


def test_who_came_back_is_not_preempted_before_it_got_on() -> None:
    scheduler = optimist(num_blocks=6)
    for name in "ab":
        load(scheduler, name)
    planned_at: list[int] = []
    request = scheduler._requests["b"]
    was_preempted = False
    while scheduler._requests:
        step(scheduler)
        is_preempted = request.state is RequestState.PREEMPTED
        if is_preempted and not was_preempted:
            planned_at.append(request.sequences[0].num_planned)
        was_preempted = is_preempted
    assert planned_at
    assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(planned_at))
    assert request.state is RequestState.FINISHED


def test_nobody_new_is_admitted_while_somebody_waits_to_come_back() -> None:
    scheduler = optimist(num_blocks=6)
    for name in "ab":
        load(scheduler, name)
    for _ in range(5):
        step(scheduler)
    scheduler.submit(make_request("new", prompt_len=1, max_tokens=1), 0.0)
    assert scheduler.admit(0.0) == ()
    scheduler.end("a", RequestState.CANCELLED, 0.0)
    assert scheduler.admit(0.0) == (), "b comes back first, though there is room for both"
    scheduler.end("b", RequestState.CANCELLED, 0.0)
    assert len(scheduler.admit(0.0)) == 1


def test_without_host_memory_the_victim_is_evicted_and_named_once() -> None:
    scheduler = optimist(num_blocks=6, num_host_blocks=2)
    for name in "ab":
        load(scheduler, name)
    for _ in range(5):
        step(scheduler)
    (evicted,) = scheduler.take_evicted()
    assert (evicted.request_id, evicted.state) == ("b", RequestState.EVICTED)
    assert scheduler.take_evicted() == ()
    assert scheduler.get("b") is None
    assert (scheduler.preemption.num_evicted, scheduler.preemption.num_swapped) == (1, 0)


@pytest.mark.parametrize("end", [RequestState.CANCELLED, RequestState.FAILED])
def test_a_preempted_request_that_ends_leaves_nothing(end: RequestState) -> None:
    scheduler = optimist(num_blocks=6)
    for name in "ab":
        load(scheduler, name)
    for _ in range(5):
        step(scheduler)
    assert scheduler.end("b", end, 0.0)
    scheduler.end("a", end, 0.0)
    assert scheduler.preemption.num_host_blocks_used == 0
    assert scheduler.ledger() == optimist(num_blocks=6).ledger()
