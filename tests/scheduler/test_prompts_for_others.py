"""An engine that does both phases: prompts that it computes for others wait for nobody who may wait for those."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.outcome import NeverFits
from scheduler.request import RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import ALL_ABLE, first_tokens, limits, make_request, running, sampled, step

RESERVED = 4


def both(num_blocks: int = 12, max_sequences: int = 4, **more: object) -> Scheduler:
    """Blocks of four tokens."""
    size = replace(limits(), num_blocks=num_blocks, max_sequences=max_sequences, num_reserved_blocks=RESERVED)
    return Scheduler(size, ALL_ABLE, AdmissionPolicy(), **more)  # type: ignore[arg-type]


def fill(scheduler: Scheduler) -> list[str]:
    """Requests whose prompts' KV is to come from elsewhere, more than there is room for; who was admitted."""
    for number in range(8):
        scheduler.submit(make_request(f"waits-{number}", prompt_len=8, local_prefill=False), 0.0)
    return [request.request_id for request in scheduler.admit(0.0)]


def test_two_engines_that_are_full_of_requests_for_each_others_prompts_go_on() -> None:
    """Each is full of requests that wait for the other's prompts, and more of them stand in front of these."""
    one, other = both(), both()
    admitted = {engine: fill(engine) for engine in (one, other)}
    assert all(0 < len(names) < 8 for names in admitted.values()), "they are full"
    for source, reader in ((one, other), (other, one)):
        for request_id in admitted[reader]:
            source.submit(make_request(f"of {request_id}", prompt_len=8, hands_over=True), 0.0)
    for source, reader in ((one, other), (other, one)):
        waiting = list(admitted[reader])
        while waiting:
            computed = [request.request_id for request in source.admit(1.0)]
            assert computed, "a prompt waits for a request that waits for a prompt"
            done: list[str] = []
            while len(done) < len(computed):
                plan = source.plan(1.0)
                assert plan is not None
                done += [prompt.request_id for prompt in source.commit(sampled(plan), 1.0).prompts]
            for request_id in computed:
                name = request_id.removeprefix("of ")
                waiting.remove(name)
                request = reader.get(name)
                assert request is not None
                reader.begin_load(name, 1.0)
                reader.kv_ready(name, first_tokens(request), 1.0)
                source.lease_ended(request_id, 1.0)


def test_a_slot_is_kept_too() -> None:
    scheduler = both(num_blocks=100, max_sequences=3)
    assert len(fill(scheduler)) == 2
    scheduler.submit(make_request("theirs", hands_over=True), 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["theirs"]


def test_what_is_kept_for_prompts_of_others_no_answer_can_need() -> None:
    scheduler = both()
    with pytest.raises(NeverFits, match="36 tokens of KV memory"):
        scheduler.submit(make_request("long", prompt_len=33, local_prefill=False), 0.0)
    scheduler.submit(make_request("theirs", prompt_len=48, hands_over=True), 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["theirs"]
    assert scheduler.free_blocks() == 0


def test_routers_are_not_told_of_memory_that_answers_do_not_get() -> None:
    scheduler = both()
    assert scheduler.free_blocks() == 12 - RESERVED
    assert Scheduler(replace(limits(), num_blocks=12), ALL_ABLE).free_blocks() == 12


def test_prompts_for_others_do_not_wait_for_who_gave_way_but_own_requests_do() -> None:
    size = replace(limits(), num_blocks=11, max_sequences=8, num_reserved_blocks=RESERVED)
    scheduler = Scheduler(size, ALL_ABLE, AdmissionPolicy(quantile=0.5, min_samples=1), num_host_blocks=20)
    for _ in range(50):
        scheduler.budget.choice_ended(2)  # so all are taken to be short
    requests = [running(scheduler, make_request(name, 8, 17, local_prefill=False)) for name in "ab"]
    while not scheduler.preemption:
        step(scheduler)
    assert [request.state for request in requests] == [RequestState.RUNNING, RequestState.PREEMPTED]
    step(scheduler)
    scheduler.submit(make_request("own", local_prefill=False), 1.0)
    scheduler.submit(make_request("theirs", hands_over=True), 1.0)
    assert scheduler.preemption
    assert [request.request_id for request in scheduler.admit(1.0)] == ["theirs"]


def test_among_prompts_for_others_too_who_has_begun_goes_first() -> None:
    scheduler = both(num_blocks=4, max_sequences=8)
    scheduler.submit(make_request("new", prompt_len=12, hands_over=True), 0.0)
    begun = make_request("begun", prompt_len=12, hands_over=True)
    begun.has_begun = True
    scheduler.submit(begun, 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["begun"]
