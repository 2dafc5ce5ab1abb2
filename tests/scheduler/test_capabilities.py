"""What an engine can do, alone and mixed: prompts for itself and for others, KV read and offered, in the same steps."""

from __future__ import annotations

import pytest

from scheduler.capabilities import DECODE, PREFILL, Capabilities
from scheduler.generated_token import Token
from scheduler.outcome import NotCapable
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import ALL_ABLE, first_tokens, limits, make_request, sampled


@pytest.mark.parametrize(
    ("able", "request_of", "what"),
    [
        (PREFILL, make_request(), "decode"),
        (PREFILL, make_request(local_prefill=False, hands_over=True), "read KV"),
        (DECODE, make_request(hands_over=True), "offer KV"),
        (Capabilities(decodes=True, reads=True), make_request(), "compute prompts"),
    ],
)
def test_what_an_engine_has_no_half_for_is_refused_by_name(able: Capabilities, request_of: Request, what: str) -> None:
    scheduler = Scheduler(limits(), able)
    with pytest.raises(NotCapable, match=f"request r: this engine cannot {what}"):
        scheduler.submit(request_of, 0.0)
    assert scheduler.ledger() == Scheduler(limits(), able).ledger()


def test_both_halves_of_the_handoff_and_decoding_in_one_step() -> None:
    """ "mine" is computed and decoded here, "theirs" computed for another engine, "came" was computed by another."""
    scheduler = Scheduler(limits(), ALL_ABLE)
    empty = scheduler.ledger()
    mine, theirs = make_request("mine"), make_request("theirs", prompt_len=6, choices=(0, 1), hands_over=True)
    came = make_request("came", prompt_len=5, local_prefill=False)
    for request in (mine, theirs, came):
        scheduler.submit(request, 0.0)
    assert scheduler.admit(0.0) == (theirs, mine, came)  # which waits for nobody
    assert [len(request.sequences) for request in (mine, theirs, came)] == [1, 1, 1]
    assert len(scheduler.begin_load("came", 0.0).block_ids) == 2
    scheduler.kv_ready("came", first_tokens(came), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [row.request_id for row in plan.rows] == ["came"]
    assert [chunk.request_id for chunk in plan.chunks] == ["theirs", "mine"]
    output = sampled(plan)
    assert all(scheduler.counts(token) for token in output.tokens)
    events = scheduler.commit(output, 1.0)
    assert events.tokens == (Token("came", 0, 1, 7, None), Token("mine", 0, 0, 7, None))
    (done,) = events.prompts
    assert done.first_tokens == (Token("theirs", 0, 0, 7, None), Token("theirs", 1, 0, 7, None))
    assert (theirs.state, len(done.block_ids)) == (RequestState.LEASED, 2)
    assert [row.request_id for row in (scheduler.plan(1.0) or plan).rows] == ["came", "mine"]
    scheduler.lease_ended("theirs", 2.0)
    for request_id in ("mine", "came"):
        scheduler.end(request_id, RequestState.CANCELLED, 2.0)
    scheduler.steps_abandoned()
    assert scheduler.ledger() == empty


def test_a_prompt_for_others_that_ends_in_flight_is_no_surplus_and_leaves_nothing() -> None:
    scheduler = Scheduler(limits(), ALL_ABLE)
    empty = scheduler.ledger()
    scheduler.submit(make_request(hands_over=True), 0.0)
    scheduler.admit(0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    output = sampled(plan)
    assert not scheduler.counts(output.tokens[0])
    events = scheduler.commit(output, 0.0)
    assert (events.tokens, events.prompts, scheduler.batch.num_surplus_tokens) == ((), (), 0)
    assert scheduler.ledger() == empty
