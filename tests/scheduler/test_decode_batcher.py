"""Running sequences, through Scheduler: growth, copy-on-write, ends, surplus tokens."""

from __future__ import annotations

import pytest

from scheduler.generated_token import FinishReason, Token
from scheduler.plan import BlockCopy, RuleContext, SampledToken, Slice, SlotInit, StepOutput, TableWrite
from scheduler.request import RequestState
from tests.scheduler.short_requests import (
    STOP,
    decode_scheduler,
    limits,
    make_request,
    running,
    sampled,
    step,
    written_blocks,
)

B = 4


@pytest.mark.parametrize("prompt_len", [B - 1, B, B + 1, 2 * B])
def test_growth_at_block_boundaries(prompt_len: int) -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(prompt_len=prompt_len, max_tokens=7, local_prefill=False))
    (sequence,) = request.sequences
    for index in range(6):
        num_before = len(sequence.block_ids)
        plan, _ = step(scheduler)
        position = prompt_len + index
        assert plan.slices == (Slice("r", 0, sequence.slot, position),)
        grows = position % B == 0
        wanted = num_before + grows
        table_writes = [write for write in plan.table_writes if write.start >= num_before]
        assert len(table_writes) == grows, f"a new block exactly when position {position} opens one"
        if index < 5:  # after the last one all is released
            assert len(sequence.block_ids) == wanted == position // B + 1
            if grows:
                assert table_writes == [TableWrite(sequence.slot, wanted - 1, (sequence.block_ids[-1],))]
        assert plan.copies == ()
    assert request.state is RequestState.FINISHED
    assert scheduler.allocator.num_free == 20


def test_the_first_plan_tells_the_runner_all_it_needs() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(prompt_len=5, choices=(2, 3), local_prefill=False))
    first, second = request.sequences
    prompt_blocks = tuple(first.block_ids)
    plan, _ = step(scheduler)
    context = RuleContext(request.spec.prompt_ids, output_start=5, stop_token_ids=request.spec.stop_token_ids)
    assert plan.slot_inits == (
        SlotInit(first.slot, 2, request.spec.sampling, 7, context, last_position=5),
        SlotInit(second.slot, 3, request.spec.sampling, 7, context, last_position=5),
    )
    # The forked one copies the block it will write; the tables are written before that.
    assert plan.table_writes[:2] == (
        TableWrite(first.slot, 0, prompt_blocks),
        TableWrite(second.slot, 0, prompt_blocks),
    )
    plan, _ = step(scheduler)
    assert plan.slot_inits == plan.table_writes == plan.copies == ()


def test_copy_on_write_leaves_every_writer_its_own_block() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(prompt_len=6, choices=(0, 1, 2), local_prefill=False))
    full, partial = request.sequences[0].block_ids
    plan, _ = step(scheduler)
    written = written_blocks(request, plan, B)
    assert len(set(written.values())) == 3
    # One keeps the original, the others copy it before the step computes.
    assert list(written.values()).count(partial) == 1
    assert {copy.destination for copy in plan.copies} == set(written.values()) - {partial}
    assert {copy.source for copy in plan.copies} == {partial}
    for sequence in request.sequences:
        assert sequence.block_ids == [full, written[sequence.choice]]
        if written[sequence.choice] != partial:
            assert TableWrite(sequence.slot, 1, (written[sequence.choice],)) in plan.table_writes
    plan, _ = step(scheduler)
    assert plan.copies == (), "once is enough"


def test_full_blocks_stay_shared() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(prompt_len=8, choices=(0, 1), local_prefill=False))
    plan, _ = step(scheduler)
    assert plan.copies == ()
    first, second = request.sequences
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    assert scheduler.allocator.counts().request == 4


def test_a_choice_that_ended_with_its_first_token_keeps_its_share_and_gets_no_row() -> None:
    scheduler = decode_scheduler(limits())
    request = make_request(prompt_len=6, choices=(0, 1), local_prefill=False)
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    scheduler.begin_load("r", 0.0)
    firsts = (Token("r", 0, 0, STOP, FinishReason.STOP), Token("r", 1, 0, 7, None))
    scheduler.kv_ready("r", firsts, 0.0)
    partial = request.sequences[0].block_ids[1]
    plan, events = step(scheduler)
    assert [row.choice for row in plan.rows] == [1]
    assert plan.copies == (BlockCopy(partial, request.sequences[1].block_ids[1]),)
    assert events == (Token("r", 1, 1, 7, None),)


def test_a_local_prompt_forks_when_its_last_chunk_is_planned() -> None:
    scheduler = decode_scheduler(limits())
    request = make_request(prompt_len=5, choices=(0, 1))
    scheduler.submit(request, 0.0)
    scheduler.admit(0.0)
    plan, events = step(scheduler)
    assert plan.rows == plan.copies == ()
    assert plan.chunks[0].sampled_choices == (0, 1)
    assert [(event.choice, event.index) for event in events] == [(0, 0), (1, 0)]
    plan, _ = step(scheduler)
    assert len(plan.copies) == 1
    assert len(set(written_blocks(request, plan, B).values())) == 2


def test_rows_come_before_prompts_in_the_budget() -> None:
    scheduler = decode_scheduler(limits(max_sequences=4, max_step_tokens=6))
    running(scheduler, make_request("a", choices=(0, 1, 2), local_prefill=False))
    scheduler.submit(make_request("b", prompt_len=9), 0.0)
    scheduler.admit(0.0)
    plan, _ = step(scheduler)
    assert (len(plan.rows), plan.num_prefill_tokens) == (3, 3)


def test_prompts_cannot_starve_beside_running_sequences() -> None:
    with pytest.raises(ValueError, match="3 step tokens for 4 sequences"):
        decode_scheduler(limits(max_sequences=4, max_step_tokens=3))


def test_finish_by_length_leaves_nothing_in_flight() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(max_tokens=3, local_prefill=False))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    assert scheduler.plan(0.0) is None, "max_tokens is planned, never exceeded"
    assert scheduler.commit(sampled(first), 0.0).tokens == (Token("r", 0, 1, 7, None),)
    assert scheduler.commit(sampled(second), 0.0).tokens == (Token("r", 0, 2, 7, FinishReason.LENGTH),)
    assert request.state is RequestState.FINISHED
    assert (scheduler.batch.num_forwarded_tokens, scheduler.batch.num_surplus_tokens) == (2, 0)
    assert scheduler.ledger() == decode_scheduler(limits()).ledger()


def test_finish_by_stop_drops_and_counts_what_lies_behind() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(max_tokens=9, local_prefill=False))
    plans = [scheduler.plan(0.0) for _ in range(3)]
    assert all(plan is not None for plan in plans)
    outputs = [sampled(plan, token_id) for plan, token_id in zip(plans, (STOP, 8, STOP), strict=True) if plan]
    assert scheduler.commit(outputs[0], 0.0).tokens == (Token("r", 0, 1, STOP, FinishReason.STOP),)
    assert request.state is RequestState.FINISHED
    assert scheduler.get("r") is None
    assert scheduler.allocator.num_free < 20, "two steps still compute on its blocks"
    assert scheduler.plan(0.0) is None
    assert scheduler.commit(outputs[1], 0.0).tokens == ()
    assert scheduler.allocator.num_free < 20
    assert scheduler.commit(outputs[2], 0.0).tokens == ()
    assert (scheduler.batch.num_forwarded_tokens, scheduler.batch.num_surplus_tokens) == (1, 2)
    assert scheduler.ledger() == decode_scheduler(limits()).ledger()


def test_one_choice_stops_and_the_others_go_on() -> None:
    scheduler = decode_scheduler(limits())
    request = running(scheduler, make_request(max_tokens=5, choices=(0, 1), local_prefill=False))
    plan = scheduler.plan(0.0)
    ahead = scheduler.plan(0.0)
    assert plan is not None
    assert ahead is not None
    output = StepOutput(plan.step_id, (SampledToken("r", 0, STOP), SampledToken("r", 1, 8)))
    events = scheduler.commit(output, 0.0).tokens
    assert [(event.choice, event.finish_reason) for event in events] == [(0, "stop"), (1, None)]
    assert request.state is RequestState.RUNNING
    later = scheduler.plan(0.0)
    assert later is not None
    assert [row.choice for row in later.rows] == [1]
    events = scheduler.commit(sampled(ahead), 0.0).tokens
    assert [(event.choice, event.index) for event in events] == [(1, 2)]
    assert scheduler.batch.num_surplus_tokens == 1


def test_tokens_of_unknown_and_cancelled_requests_are_surplus() -> None:
    scheduler = decode_scheduler(limits())
    running(scheduler, make_request(local_prefill=False))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.end("r", RequestState.CANCELLED, 0.0)
    output = StepOutput(plan.step_id, (*sampled(plan).tokens, SampledToken("stranger", 0, 1)))
    assert scheduler.commit(output, 0.0).tokens == ()
    assert (scheduler.batch.num_forwarded_tokens, scheduler.batch.num_surplus_tokens) == (0, 2)
    assert scheduler.allocator.num_free == 20


def test_what_comes_behind_a_choices_end_does_not_count() -> None:
    """At lag 1 its row is launched already: whatever it brings must not end the other choices."""
    scheduler = decode_scheduler(limits(), lag=1)
    running(scheduler, make_request(prompt_len=3, choices=(0, 1), max_tokens=9, local_prefill=False))
    first = scheduler.plan(0.0)
    assert first is not None
    assert scheduler.plan(0.0) is not None  # before the tokens of the first are known
    scheduler.commit(StepOutput(first.step_id, (SampledToken("r", 0, STOP), SampledToken("r", 1, 8))), 0.0)
    assert [scheduler.counts(SampledToken("r", choice, -2)) for choice in (0, 1, 2)] == [False, True, False]
    assert not scheduler.counts(SampledToken("another", 0, 8))
