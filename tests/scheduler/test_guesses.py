"""Rows with guesses, as a batcher to come may plan them: a commit takes how many of their tokens count.

The batcher here guesses the next tokens of the reference's text, right or wrong as chance has it.
"""

from __future__ import annotations

import random

import pytest

from scheduler.decode_batcher import DecodeBatcher
from scheduler.engine_core import EngineCore
from scheduler.generated_token import Token
from scheduler.generation_spec import GenerationSpec
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import Accepted, SampledToken, Slice, StepOutput, TableWrite
from scheduler.pool_limits import PoolLimits
from scheduler.request import Request, RequestState, Sequence
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.paged_model import PagedRunner, reference_tokens, until_stop
from tests.scheduler.short_requests import STOP, decode_scheduler, limits, make_request, projected, running

B = 4
_MOST_GUESSES = 5


class GuessingBatcher(DecodeBatcher):
    """Guesses up to `most` tokens of each row, of those that have any left."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, most: int, least: int = 0) -> None:
        super().__init__(scheduler.allocator, scheduler.builder, scheduler.limits.block_size)
        self._rng, self._most, self._least = rng, most, least

    def _plan_row(self, request: Request, sequence: Sequence) -> Slice:
        assert request.needs_known_tokens
        row = super()._plan_row(request, sequence)
        count = min(self._rng.randint(self._least, self._most), request.spec.max_tokens - sequence.num_planned)
        text = reference_tokens(
            request.spec.prompt_ids, sequence.choice, request.spec.sampling.seed, request.spec.max_tokens
        )
        guesses = [token if self._rng.random() < 0.7 else token + 1 for token in text[sequence.num_planned - 1 :]]
        sequence.num_planned += count
        sequence.num_unsure += count
        for position in range(row.start + 1, row.start + 1 + count):
            self._make_writable(sequence, position // self._block_size)
        return row._replace(num_tokens=1 + count, num_sampled=1 + count, token_ids=tuple(guesses[:count]))


def guessing(scheduler: Scheduler, seed: int = 0, most: int = _MOST_GUESSES, least: int = 0) -> Scheduler:
    scheduler.batch = GuessingBatcher(scheduler, random.Random(seed), most, least)
    return scheduler


def commit(scheduler: Scheduler, step_id: int, token_ids: tuple[int, ...], num_sampled: int) -> tuple[Token, ...]:
    """Of request "r": of one row, the tokens that count."""
    tokens = tuple(SampledToken("r", 0, token_id) for token_id in token_ids)
    accepted = (Accepted("r", 0, len(token_ids), num_sampled),)
    return scheduler.commit(StepOutput(step_id, tokens, accepted=accepted), 0.0).tokens


def a_row(scheduler: Scheduler) -> tuple[int, Slice]:
    plan = scheduler.plan(0.0)
    assert plan is not None
    (row,) = plan.rows
    return plan.step_id, row


@pytest.mark.parametrize(("num_accepted", "num_blocks"), [(1, 2), (2, 2), (3, 3), (6, 3)])
def test_a_sequence_is_as_far_as_what_counts(num_accepted: int, num_blocks: int) -> None:
    """A prompt of 6 tokens and 6 tokens sampled at once, over two blocks of 4 and into a third."""
    scheduler = guessing(decode_scheduler(limits()), least=5)
    request = make_request(prompt_len=6, max_tokens=20, local_prefill=False)
    request.needs_known_tokens = True
    running(scheduler, request)
    (sequence,) = request.sequences
    step_id, row = a_row(scheduler)
    assert (row.start, row.num_tokens, row.num_sampled, len(row.token_ids)) == (6, 6, 6, 5)
    assert (sequence.num_known, sequence.num_planned, len(sequence.block_ids)) == (1, 7, 3)
    events = commit(scheduler, step_id, tuple(range(20, 20 + num_accepted)), 6)
    assert [(event.index, event.token_id) for event in events] == [(1 + i, 20 + i) for i in range(num_accepted)]
    assert (sequence.num_known, sequence.num_planned) == (1 + num_accepted, 1 + num_accepted)
    assert len(sequence.block_ids) == num_blocks == num_blocks_for(6 + num_accepted, B)
    assert scheduler.allocator.counts().request == num_blocks
    assert scheduler.batch.num_forwarded_tokens == num_accepted
    profile = projected(scheduler).projection.get("r")
    assert profile is not None
    assert profile.until == 19 - num_accepted, "step 1 is next, and each of the tokens left takes one"
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.rows[0].start == 6 + num_accepted
    grown = [TableWrite(sequence.slot, i, (sequence.block_ids[i],)) for i in range(num_blocks, len(sequence.block_ids))]
    assert list(plan.table_writes) == grown, "blocks that were given back are named anew"


def test_what_is_accepted_behind_a_stop_is_surplus() -> None:
    scheduler = guessing(decode_scheduler(limits()), least=5)
    request = make_request(prompt_len=6, max_tokens=20, local_prefill=False)
    request.needs_known_tokens = True
    running(scheduler, request)
    step_id, _ = a_row(scheduler)
    events = commit(scheduler, step_id, (20, STOP, 21, 22), 6)
    assert [(event.token_id, event.finish_reason) for event in events] == [(20, None), (STOP, "stop")]
    assert scheduler.batch.num_surplus_tokens == 2
    assert request.state is RequestState.FINISHED
    assert scheduler.ledger() == decode_scheduler(limits()).ledger()


def test_of_a_request_that_is_over_nothing_is_accepted() -> None:
    scheduler = guessing(decode_scheduler(limits()), least=5)
    request = make_request(prompt_len=6, max_tokens=20, local_prefill=False)
    request.needs_known_tokens = True
    running(scheduler, request)
    step_id, _ = a_row(scheduler)
    scheduler.end("r", RequestState.CANCELLED, 0.0)
    assert commit(scheduler, step_id, (20, 21), 6) == ()
    assert scheduler.ledger() == decode_scheduler(limits()).ledger()


@pytest.mark.parametrize(("num_behind", "num_blocks"), [(1, 2), (2, 3)])
def test_blocks_that_a_later_row_may_write_are_kept(num_behind: int, num_blocks: int) -> None:
    """Four guesses, all wrong, and a row of so many tokens in flight behind them: it lies behind what counts."""
    scheduler = decode_scheduler(limits(), lag=1)
    request = running(scheduler, make_request(prompt_len=6, max_tokens=20, local_prefill=False))
    (sequence,) = request.sequences
    sequence.num_planned, sequence.num_known, sequence.num_unsure = 6 + num_behind, 2, 3 + num_behind
    sequence.block_ids += scheduler.allocator.allocate(1)
    scheduler.batch.settle(Accepted("r", 0, 1, 5))
    assert (sequence.num_planned, sequence.num_known) == (2 + num_behind, 2)
    assert sequence.num_unsure == num_behind - 1
    assert len(sequence.block_ids) == num_blocks == num_blocks_for(6 + 1 + num_behind, B)
    assert scheduler.allocator.counts().request == num_blocks


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_texts_are_those_without_guesses(seed: int, lag: int) -> None:
    """Choices, prompts in chunks beside rows, stops; every row's blocks after every commit."""
    rng = random.Random(seed)
    size = PoolLimits(num_blocks=300, block_size=rng.choice([1, 2, 3, 4]), max_sequences=6, max_step_tokens=40)
    scheduler = guessing(decode_scheduler(size, lag=lag), seed)
    core: EngineCore[StepOutput] = EngineCore(scheduler)
    runner = PagedRunner(size, max_blocks=90)
    requests = [_request(f"r{number}", rng) for number in range(14)]
    for request in requests:
        scheduler.submit(request, 0.0)
    texts: dict[tuple[str, int], list[int]] = {}
    num_guesses = num_right = 0
    while scheduler.ledger().num_queued or scheduler.ledger().num_active:
        turn = core.turn(0.0)
        if turn.plan is not None:
            assert sum(part.num_tokens for part in turn.plan.slices) <= size.max_step_tokens
            core.launched(runner.run(turn.plan))
        for output in core.due(turn):
            num_guesses += sum(one.num_sampled - 1 for one in output.accepted)
            num_right += sum(one.num_accepted - 1 for one in output.accepted)
            for event in core.commit(output, 0.0).tokens:
                texts.setdefault((event.request_id, event.choice), []).append(event.token_id)
            _check_blocks(scheduler)
    for request in requests:
        for choice in request.spec.choices:
            whole = reference_tokens(
                request.spec.prompt_ids, choice, request.spec.sampling.seed, request.spec.max_tokens
            )
            assert tuple(texts[request.request_id, choice]) == until_stop(whole, request.spec.stop_token_ids).token_ids
    assert num_guesses > num_right > 50, "guesses of both kinds"
    assert scheduler.ledger() == decode_scheduler(size).ledger()


def _request(request_id: str, rng: random.Random) -> Request:
    prompt_ids = tuple(rng.randrange(1000) for _ in range(rng.choice([1, 5, 30, 60])))
    seed, max_tokens = rng.randrange(1 << 30), rng.randint(1, 25)
    stops = {reference_tokens(prompt_ids, 0, seed, max_tokens)[-1]} if rng.random() < 0.3 else set()
    choices = rng.choice([(0,), (0, 1), (1, 2, 4)])
    spec = GenerationSpec(prompt_ids, choices, max_tokens, frozenset(stops), SamplingParams(seed=seed))
    return Request(request_id, spec, 1e9, needs_known_tokens=True)


def _check_blocks(scheduler: Scheduler) -> None:
    """Each sequence has the blocks that its known tokens have been written to, and no more."""
    scheduler.allocator.check_integrity()
    for request in scheduler.batch.requests:
        for sequence in request.sequences:
            if sequence.finish_reason is None and sequence.num_known == sequence.num_planned > 1:
                num_written = request.prompt_len + sequence.num_known - 1
                assert len(sequence.block_ids) == num_blocks_for(num_written, scheduler.limits.block_size)
