"""Queue, admission, ends in every state, the transfer as second owner, deadlines, and what is left afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.generated_token import FinishReason, Token
from scheduler.outcome import DuplicateRequest, NeverFits, PromptDone
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import (
    STOP,
    decode_scheduler,
    limits,
    make_request,
    prefill_scheduler,
    running,
    sampled,
    step,
    works_on,
)

ENDS = [RequestState.CANCELLED, RequestState.FAILED]


def at_baseline(scheduler: Scheduler) -> bool:
    scheduler.allocator.check_integrity()
    fresh = Scheduler(scheduler.limits, scheduler.capabilities)
    return scheduler.ledger() == fresh.ledger() and scheduler.next_deadline_s is None


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


# -- admission -----------------------------------------------------------------------------------------


def test_first_come_first_served_and_the_head_is_not_overtaken() -> None:
    scheduler = decode_scheduler(limits(num_blocks=6), AdmissionPolicy(max_overtakes=0))
    for request_id, prompt_len in (("small", 4), ("large", 16), ("tiny", 1)):
        scheduler.submit(make_request(request_id, prompt_len, max_tokens=4), 0.0)
    assert [request.request_id for request in scheduler.admit(1.0)] == ["small"]
    assert scheduler.admit(2.0) == ()
    assert scheduler.num_queued == 2
    scheduler.end("small", RequestState.CANCELLED, 3.0)
    assert [request.request_id for request in scheduler.admit(3.0)] == ["large", "tiny"]


@pytest.mark.parametrize(("leaves", "then"), [("a", ["b", "c"]), ("b", ["c"])])
def test_a_head_that_waits_for_slots_is_not_overtaken_either(leaves: str, then: list[str]) -> None:
    scheduler = decode_scheduler(limits(max_sequences=3), AdmissionPolicy(max_overtakes=0))
    for request_id, choices in (("a", (0, 1)), ("b", (0, 1)), ("c", (0,))):
        scheduler.submit(make_request(request_id, choices=choices), 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["a"]
    assert scheduler.admit(0.0) == ()
    scheduler.end(leaves, RequestState.CANCELLED, 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == then


def test_the_head_alone_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = prefill_scheduler(limits(num_blocks=4))
    for number in range(1000):
        scheduler.submit(make_request(f"r{number}", prompt_len=16, hands_over=True), 0.0)
    scheduler.admit(0.0)
    asked: list[str] = []
    promise = scheduler._promise

    def asking(request: Request) -> bool:
        asked.append(request.request_id)
        return promise(request)

    monkeypatch.setattr(scheduler, "_promise", asking)
    assert scheduler.admit(0.0) == ()
    assert asked == ["r1"]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    decode = decode_scheduler(limits(num_blocks=5, max_sequences=2))
    with pytest.raises(NeverFits, match="needs 24 tokens of KV memory, the pool has 20"):
        decode.submit(make_request(prompt_len=19, max_tokens=3), 0.0)
    with pytest.raises(NeverFits, match="needs 3 sequence slots, the pool has 2"):
        decode.submit(make_request(choices=(0, 1, 2), max_tokens=1), 0.0)
    decode.submit(make_request(prompt_len=19, max_tokens=2), 0.0)
    prefill = prefill_scheduler(limits(num_blocks=5, max_sequences=1))
    prefill.submit(make_request(prompt_len=20, max_tokens=99, choices=(0, 1, 2), hands_over=True), 0.0)
    with pytest.raises(NeverFits):
        prefill.submit(make_request("b", prompt_len=21, hands_over=True), 0.0)
    assert (decode.num_queued, prefill.num_queued) == (1, 1)


def test_queued_prompt_tokens_are_those_to_compute_here() -> None:
    scheduler = decode_scheduler(limits(max_step_tokens=5))
    scheduler.submit(make_request("a", 9, max_tokens=1), 0.0)
    scheduler.submit(make_request("b", 7), 0.0)
    scheduler.submit(make_request("c", 11, local_prefill=False), 0.0)
    assert scheduler.queued_prompt_tokens == 16
    scheduler.admit(0.0)
    assert scheduler.queued_prompt_tokens == 16
    step(scheduler)
    assert scheduler.queued_prompt_tokens == 11
    scheduler.end("a", RequestState.CANCELLED, 0.0)
    assert scheduler.queued_prompt_tokens == 7
    scheduler.end("b", RequestState.CANCELLED, 0.0)
    scheduler.end("c", RequestState.CANCELLED, 0.0)
    assert scheduler.queued_prompt_tokens == 0
    assert at_baseline(scheduler)


# -- the same id again ---------------------------------------------------------------------------------


def test_a_known_id_is_refused_and_the_first_one_lives_on() -> None:
    scheduler = decode_scheduler(limits())
    first = running(scheduler, make_request(local_prefill=False))
    with pytest.raises(DuplicateRequest, match="request r was submitted before"):
        scheduler.submit(make_request(), 0.0)
    assert scheduler.get("r") is first
    assert scheduler.num_queued == 0


def test_an_id_may_come_again_when_everything_was_let_go() -> None:
    scheduler = decode_scheduler(limits())
    running(scheduler, make_request(local_prefill=False, deadline_s=10.0))
    plan = planned(scheduler)
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    with pytest.raises(DuplicateRequest):
        scheduler.submit(make_request(), 0.0)  # a step in flight still computes for the first
    scheduler.commit(sampled(plan), 0.0)
    again = make_request(deadline_s=50.0)
    scheduler.submit(again, 0.0)
    assert scheduler.expired(20.0) == (), "the first one's deadline is not the second one's"
    assert scheduler.next_deadline_s == 50.0
    assert scheduler.admit(20.0) == (again,)


# -- ends in every state -------------------------------------------------------------------------------


def decode_in(state: RequestState, choices: tuple[int, ...] = (0, 1)) -> Scheduler:
    """A decode scheduler with one request "r" in this state, no step in flight."""
    scheduler = decode_scheduler(limits(max_step_tokens=5))
    local = state is RequestState.PREFILLING
    scheduler.submit(make_request(prompt_len=7, choices=choices, local_prefill=local), 0.0)
    if state is not RequestState.QUEUED:
        scheduler.admit(0.0)
    if state is RequestState.PREFILLING:
        step(scheduler)
    if state in {RequestState.LOADING, RequestState.RUNNING}:
        scheduler.begin_load("r", 0.0)
    if state is RequestState.RUNNING:
        scheduler.kv_ready("r", [Token("r", choice, 0, 7, None) for choice in choices], 0.0)
        step(scheduler)
    request = scheduler.get("r")
    assert request is not None
    assert request.state is state
    return scheduler


def prefill_in(state: RequestState) -> Scheduler:
    scheduler = prefill_scheduler(limits(max_step_tokens=5))
    scheduler.submit(make_request(prompt_len=7, hands_over=True), 0.0)
    if state is not RequestState.QUEUED:
        scheduler.admit(0.0)
    if state is RequestState.PREFILLING:
        scheduler.commit(sampled(planned(scheduler)), 0.0)
    if state is RequestState.LEASED:
        for _ in range(2):
            scheduler.commit(sampled(planned(scheduler)), 0.0)
    request = scheduler.get("r")
    assert request is not None
    assert request.state is state
    return scheduler


_DECODE_STATES = [
    RequestState.QUEUED,
    RequestState.ADMITTED,
    RequestState.PREFILLING,
    RequestState.LOADING,
    RequestState.RUNNING,
]
_PREFILL_STATES = [RequestState.QUEUED, RequestState.ADMITTED, RequestState.PREFILLING, RequestState.LEASED]
IN_STATE: list[tuple[Callable[[RequestState], Scheduler], RequestState]] = [
    *((decode_in, state) for state in _DECODE_STATES),
    *((prefill_in, state) for state in _PREFILL_STATES),
]
in_every_state = pytest.mark.parametrize(
    ("scheduler_in", "state"), IN_STATE, ids=[f"{make.__name__[:-3]}-{state.name}" for make, state in IN_STATE]
)


@in_every_state
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)
def test_end_in_every_state(
    scheduler_in: Callable[[RequestState], Scheduler], state: RequestState, end: RequestState
) -> None:
    scheduler = scheduler_in(state)
    request = scheduler.get("r")
    assert request is not None
    assert scheduler.end("r", end, 5.0)
    assert request.state is end
    assert request.entered_s[end] == 5.0
    assert scheduler.get("r") is None
    assert not scheduler.end("r", end, 6.0), "once"
    assert scheduler.plan(6.0) is None
    assert scheduler.next_deadline_s is None
    held = 2 if state in {RequestState.LOADING, RequestState.LEASED} else 0
    if request.hands_over and state is RequestState.PREFILLING:
        held = 1  # a part was handed over
    assert scheduler.ledger().blocks.transfer_only == scheduler.budget.promised == held
    scheduler.transfer_ended("r")
    scheduler.transfer_ended("r")
    assert at_baseline(scheduler)


@in_every_state
def test_end_while_a_step_is_in_flight(scheduler_in: Callable[[RequestState], Scheduler], state: RequestState) -> None:
    scheduler = scheduler_in(state)
    hands_over = not scheduler.capabilities.decodes
    scheduler.submit(make_request("other", prompt_len=9, hands_over=hands_over), 0.0)
    scheduler.admit(0.0)
    plan = planned(scheduler)
    free_before, promised_before = scheduler.allocator.num_free, scheduler.budget.promised
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    scheduler.transfer_ended("r")
    if "r" in works_on(plan):
        assert scheduler.allocator.num_free == free_before
        if scheduler.capabilities.decodes:
            assert 0 < scheduler.budget.promised <= promised_before
        else:
            assert scheduler.budget.promised == promised_before
    scheduler.end("other", RequestState.CANCELLED, 0.0)
    scheduler.commit(sampled(plan), 0.0)
    assert at_baseline(scheduler)


# -- the transfer as second owner ----------------------------------------------------------------------


def test_a_read_that_ends_late_keeps_its_blocks_and_only_those() -> None:
    scheduler = decode_in(RequestState.LOADING, choices=(0, 1, 2, 3))
    scheduler.submit(make_request("next", prompt_len=64, max_tokens=1), 0.0)
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    ledger = scheduler.ledger()
    assert (ledger.used_slots, ledger.blocks.transfer_only, ledger.promised_blocks) == (0, 2, 2)
    (admitted,) = scheduler.admit(0.0)
    assert not set(admitted.sequences[0].block_ids) & {0, 1}
    assert scheduler.budget.available == 2
    scheduler.transfer_ended("r")
    assert scheduler.budget.available == 4


def test_a_read_that_ended_before_its_request() -> None:
    scheduler = decode_in(RequestState.LOADING)
    scheduler.transfer_ended("r")
    assert scheduler.ledger().blocks.request == 2
    scheduler.end("r", RequestState.FAILED, 0.0)
    assert at_baseline(scheduler)


def test_a_read_that_ended_before_it_was_confirmed() -> None:
    scheduler = decode_in(RequestState.LOADING)
    scheduler.transfer_ended("r")
    scheduler.kv_ready("r", (Token("r", 0, 0, 7, None), Token("r", 1, 0, 8, None)), 0.0)
    for _ in range(3):
        step(scheduler)
    assert at_baseline(scheduler)


@pytest.mark.parametrize(
    ("max_tokens", "firsts"),
    [
        (4, [(0, 7, None)]),
        (4, [(0, 7, None), (1, 7, None), (2, 7, None)]),
        (4, [(0, STOP, FinishReason.STOP), (1, STOP, FinishReason.STOP)]),
        (1, [(0, 7, None), (1, 7, None)]),
    ],
    ids=["one missing", "one too many", "all ended", "nothing to generate"],
)
def test_first_tokens_that_make_no_sense_change_nothing(
    max_tokens: int, firsts: list[tuple[int, int, FinishReason | None]]
) -> None:
    scheduler = decode_scheduler(limits())
    request = make_request(max_tokens=max_tokens, choices=(0, 1), local_prefill=False)
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    scheduler.begin_load("r", 0.0)
    before = scheduler.ledger()
    with pytest.raises(ValueError):
        scheduler.kv_ready("r", [Token("r", choice, 0, token_id, reason) for choice, token_id, reason in firsts], 0.0)
    assert request.state is RequestState.LOADING
    assert scheduler.ledger() == before
    scheduler.end("r", RequestState.FAILED, 0.0)
    scheduler.transfer_ended("r")
    assert at_baseline(scheduler)


# -- prefill: leases -----------------------------------------------------------------------------------


def test_a_finished_prompt_is_leased_without_its_slot() -> None:
    scheduler = prefill_scheduler(limits(max_sequences=1))
    request = make_request(prompt_len=5, choices=(0, 3), hands_over=True)
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    (done,) = scheduler.commit(sampled(planned(scheduler)), 2.0).prompts
    events = (Token("r", 0, 0, 7, None), Token("r", 3, 0, 7, None))
    assert done == PromptDone("r", events, (0, 1))
    assert request.state is RequestState.LEASED
    ledger = scheduler.ledger()
    assert (ledger.used_slots, ledger.num_leased, ledger.blocks.transfer_only) == (0, 1, 2)
    assert ledger.promised_blocks == 2
    scheduler.lease_ended("r", 3.0)
    assert request.state is RequestState.FINISHED
    scheduler.lease_ended("r", 4.0)
    assert at_baseline(scheduler)


@pytest.mark.parametrize(
    ("max_tokens", "token_id", "reason"),
    [(1, 7, FinishReason.LENGTH), (4, STOP, FinishReason.STOP), (1, STOP, FinishReason.STOP)],
)
def test_a_prompt_whose_choices_all_ended_leaves_nothing(max_tokens: int, token_id: int, reason: FinishReason) -> None:
    scheduler = prefill_scheduler(limits())
    scheduler.submit(make_request(max_tokens=max_tokens, hands_over=True), 0.0)
    scheduler.admit(0.0)
    (done,) = scheduler.commit(sampled(planned(scheduler), token_id), 0.0).prompts
    assert done == PromptDone("r", (Token("r", 0, 0, token_id, reason),), ())
    assert at_baseline(scheduler)


@pytest.mark.parametrize("state", _PREFILL_STATES, ids=lambda state: state.name)
def test_the_end_of_a_lease_that_does_not_exist_ends_nothing(state: RequestState) -> None:
    scheduler = prefill_in(state)
    scheduler.lease_ended("stranger", 0.0)
    if state is not RequestState.LEASED:
        scheduler.lease_ended("r", 0.0)
    request = scheduler.get("r")
    assert request is not None
    assert request.state is state


def test_blocks_of_a_lease_are_not_given_away() -> None:
    scheduler = prefill_scheduler(limits(num_blocks=3))
    scheduler.submit(make_request("a", prompt_len=8, hands_over=True), 0.0)
    scheduler.submit(make_request("b", prompt_len=8, hands_over=True), 0.0)
    scheduler.admit(0.0)
    scheduler.commit(sampled(planned(scheduler)), 0.0)
    assert scheduler.admit(0.0) == ()
    assert scheduler.plan(0.0) is None
    scheduler.lease_ended("a", 0.0)
    assert [request.request_id for request in scheduler.admit(0.0)] == ["b"]


# -- deadlines -----------------------------------------------------------------------------------------


@in_every_state
def test_deadline_in_every_state(scheduler_in: Callable[[RequestState], Scheduler], state: RequestState) -> None:
    scheduler = scheduler_in(state)
    assert scheduler.next_deadline_s == 100.0
    assert scheduler.expired(99.9) == ()
    assert scheduler.expired(100.0) == ("r",)
    assert scheduler.expired(101.0) == (), "named once"
    assert scheduler.next_deadline_s is None, "the loop must not spin on it"
    assert scheduler.get("r") is not None, "the caller ends it"


def test_a_lease_that_ended_has_no_deadline_left() -> None:
    scheduler = prefill_in(RequestState.LEASED)
    scheduler.lease_ended("r", 0.0)
    assert scheduler.next_deadline_s is None
    assert scheduler.expired(1000.0) == ()


def test_deadlines_come_in_order() -> None:
    scheduler = decode_scheduler(limits())
    for request_id, deadline_s in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        scheduler.submit(make_request(request_id, deadline_s=deadline_s), 0.0)
    scheduler.end("b", RequestState.CANCELLED, 0.0)
    assert scheduler.next_deadline_s == 20.0
    assert scheduler.expired(30.0) == ("c", "a")


# -- the engine failed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("half_planned", [False, True])
def test_nothing_waits_for_abandoned_steps(half_planned: bool) -> None:
    scheduler = decode_scheduler(limits())
    for request_id in "ab":
        running(scheduler, make_request(request_id, prompt_len=6, choices=(0, 1), local_prefill=False))
    if half_planned:
        scheduler.batch.plan_rows(scheduler.builder.next_step_id, 20)  # and then the plan raised
    else:
        planned(scheduler)
    scheduler.steps_abandoned()
    for request_id in "ab":
        scheduler.end(request_id, RequestState.FAILED, 0.0)
    assert at_baseline(scheduler)
    later = running(scheduler, make_request("c", prompt_len=14, local_prefill=False))
    plan = planned(scheduler)
    assert plan.copies == (), "a copy of the abandoned plan would overwrite the new owner's block"
    # What is left of the old plan comes before what the new owner of a slot needs.
    table: dict[tuple[int, int], int] = {}
    for write in plan.table_writes:
        table.update({(write.slot, write.start + i): block_id for i, block_id in enumerate(write.block_ids)})
    (sequence,) = later.sequences
    assert [table[sequence.slot, i] for i in range(len(sequence.block_ids))] == sequence.block_ids


def test_step_ids_are_never_used_twice() -> None:
    scheduler = decode_scheduler(limits())
    running(scheduler, make_request("a", local_prefill=False))
    seen = [planned(scheduler).step_id]
    scheduler.steps_abandoned()
    scheduler.end("a", RequestState.FAILED, 0.0)
    running(scheduler, make_request("b", local_prefill=False))
    seen += [planned(scheduler).step_id for _ in range(2)]
    assert all(left < right for left, right in itertools.pairwise(seen))


def test_requests_that_had_not_started_survive_a_failed_step() -> None:
    scheduler = decode_scheduler(limits())
    waiting: Request = make_request("a", prompt_len=6)
    scheduler.submit(waiting, 0.0)
    scheduler.admit(0.0)
    scheduler.steps_abandoned()
    plan, _ = step(scheduler)
    assert [write.block_ids for write in plan.table_writes] == [tuple(waiting.sequences[0].block_ids)]
    for _ in range(3):
        step(scheduler)
    assert at_baseline(scheduler)
