"""Prompts packed into steps: budget, order, and every prompt token exactly once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler.capabilities import DECODE
from scheduler.plan import SampleTarget, Slice
from scheduler.pool_limits import PoolLimits
from scheduler.prefill_batcher import PrefillBatcher, chunk_end, num_pieces
from scheduler.request import Request, RequestState, Sequence
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import make_request


def admitted(
    request_id: str, prompt_len: int, choices: tuple[int, ...] = (0,), num_slots: int = 1, **values: Any
) -> Request:
    request = make_request(request_id, prompt_len, choices=choices, **values)
    request.enter(RequestState.ADMITTED, 0.0)
    request.sequences = [Sequence(choice, slot=10 + index) for index, choice in enumerate(choices[:num_slots])]
    return request


def batcher_of(*requests: Request, most_shared_tokens: int | None = None, chunk_multiple: int = 1) -> PrefillBatcher:
    batcher = PrefillBatcher(most_shared_tokens, chunk_multiple)
    for request in requests:
        batcher.add(request)
    return batcher


def spans(chunks: list[Slice]) -> list[tuple[str, int, int]]:
    assert all(chunk.is_prompt for chunk in chunks)
    return [(chunk.request_id, chunk.start, chunk.end) for chunk in chunks]


def targets(chunk: Slice) -> tuple[SampleTarget, ...]:
    """Who gets a token from its end."""
    return (SampleTarget(chunk.slot, chunk.choice),) * chunk.num_sampled + chunk.forks


def test_short_prompts_share_a_step() -> None:
    a, b = admitted("a", 3), admitted("b", 2)
    batcher = batcher_of(a, b)
    chunks, completed = batcher.plan_chunks(10, 5, 1.0)
    assert spans(chunks) == [("a", 0, 3), ("b", 0, 2)]
    assert completed == [a, b]
    assert [targets(chunk) for chunk in chunks] == [(SampleTarget(10, 0),), (SampleTarget(10, 0),)]
    assert a.last_step_id == b.last_step_id == 5
    assert a.entered_s[RequestState.PREFILLING] == 1.0
    assert len(batcher) == batcher.num_pending_tokens == 0


def test_a_long_prompt_goes_in_chunks_and_the_next_takes_what_is_left() -> None:
    a, b = admitted("a", 7), admitted("b", 5)
    batcher = batcher_of(a, b)
    assert spans(batcher.plan_chunks(4, 0, 0.0)[0]) == [("a", 0, 4)]
    assert batcher.num_pending_tokens == 8
    chunks, completed = batcher.plan_chunks(4, 1, 0.0)
    assert spans(chunks) == [("a", 4, 7), ("b", 0, 1)]
    assert completed == [a]
    assert [bool(targets(chunk)) for chunk in chunks] == [True, False]
    assert spans(batcher.plan_chunks(4, 2, 0.0)[0]) == [("b", 1, 5)]


def test_a_prompt_is_not_begun_where_it_would_be_cut_once_more() -> None:
    a, b, c = admitted("a", 7), admitted("b", 4), admitted("c", 1)
    batcher = batcher_of(a, b, c)
    assert spans(batcher.plan_chunks(5, 0, 0.0)[0]) == [("a", 0, 5)]
    chunks, completed = batcher.plan_chunks(5, 1, 0.0)
    assert spans(chunks) == [("a", 5, 7)], "3 tokens are left: not all of b, and c does not overtake it"
    assert completed == [a]
    assert b.state is RequestState.ADMITTED
    assert spans(batcher.plan_chunks(5, 2, 0.0)[0]) == [("b", 0, 4), ("c", 0, 1)]


def test_a_chunk_that_fills_the_budget_exactly_leaves_nothing_for_the_next() -> None:
    batcher = batcher_of(admitted("a", 4), admitted("b", 1))
    chunks, completed = batcher.plan_chunks(4, 0, 0.0)
    assert spans(chunks) == [("a", 0, 4)]
    assert len(completed) == 1


def test_a_long_prompt_has_a_step_to_itself_and_short_ones_share_what_keeps_a_device_busy() -> None:
    requests = [admitted("a", 3), admitted("b", 4), admitted("c", 2), admitted("long", 30), admitted("d", 1)]
    batcher = batcher_of(*requests, most_shared_tokens=8)
    steps = [spans(batcher.plan_chunks(20, step_id, 0.0)[0]) for step_id in range(4)]
    assert steps == [
        [("a", 0, 3), ("b", 0, 4)],
        [("c", 0, 2)],
        [("long", 0, 20)],
        [("long", 20, 30)],
    ]
    assert spans(batcher.plan_chunks(20, 4, 0.0)[0]) == [("d", 0, 1)]


def test_of_two_lanes_only_the_prompts_of_one_do_not_wait_for_what_shares_their_step() -> None:
    limits = PoolLimits(1000, block_size=16, max_sequences=8, max_step_tokens=8192)
    for has_two_lanes, num_together in ((False, 3), (True, 1)):
        scheduler = Scheduler(limits, DECODE, has_two_lanes=has_two_lanes)
        for name in "abc":
            scheduler.submit(make_request(name, 2048), 0.0)
        scheduler.admit(0.0)
        plan = scheduler.plan_prefill(0.0) if has_two_lanes else scheduler.plan(0.0)
        assert plan is not None
        assert len(plan.chunks) == num_together


@pytest.mark.parametrize(
    ("start", "prompt_len", "room", "end"),
    [
        (0, 8192, 2304, 2048),  # cut where the library goes on
        (2048, 8192, 2304, 4096),
        (6144, 8192, 2304, 8192),
        (0, 2304, 2304, 2304),  # one step does all of it
        (0, 2305, 2304, 2048),
        (4096, 6400, 2304, 6400),
        (1000, 8192, 2304, 2048),  # behind a prefix that was found: back to a multiple
        (1536, 8192, 2048, 2048),
        (1537, 8192, 2048, 3585),  # only 511 tokens would be left of it
        (1537, 8192, 2304, 3841),
        (1793, 8192, 2304, 4096),
        (0, 8192, 2047, 2047),  # rows take so much of each step that no chunk is as long
        (0, 40000, 8448, 8192),
        (0, 40000, 6000, 4096),
    ],
)
def test_a_prompt_that_goes_on_is_cut_at_a_multiple_where_there_is_room_for_one(
    start: int, prompt_len: int, room: int, end: int
) -> None:
    assert chunk_end(start, prompt_len, room, 2048) == end
    assert chunk_end(start, prompt_len, room, 1) == min(prompt_len, start + room)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_pieces_are_counted_as_prompts_are_cut(multiple: int) -> None:
    rng = random.Random(multiple)
    for _ in range(300):
        prompt_len, budget = rng.randint(1, 300), rng.randint(1, 90)
        start, room = rng.randrange(prompt_len), rng.randint(1, budget)
        expected, at = 0, start
        while at < prompt_len:
            end = chunk_end(at, prompt_len, room if at == start else budget, multiple)
            assert at < end <= at + budget, "never over the budget, and it always goes on"
            expected, at = expected + 1, end
        assert num_pieces(start, prompt_len, room, budget, multiple) == expected


def test_what_a_cut_at_a_multiple_leaves_of_a_step_stays_empty() -> None:
    batcher = batcher_of(admitted("a", 20), admitted("b", 2), chunk_multiple=8)
    steps = [spans(batcher.plan_chunks(9, step_id, 0.0)[0]) for step_id in range(3)]
    assert steps == [[("a", 0, 8)], [("a", 8, 16)], [("a", 16, 20), ("b", 0, 2)]]


def test_a_prompt_is_not_begun_where_its_cuts_would_make_a_piece_more() -> None:
    """Five tokens are left of the step: by length alone the second would be three chunks either way."""
    batcher = batcher_of(admitted("a", 4), admitted("b", 23), chunk_multiple=8)
    steps = [spans(batcher.plan_chunks(9, step_id, 0.0)[0]) for step_id in range(4)]
    assert steps == [[("a", 0, 4)], [("b", 0, 8)], [("b", 8, 16)], [("b", 16, 23)]]


@pytest.mark.parametrize("budget", [0, -3])
def test_no_budget_plans_nothing(budget: int) -> None:
    request = admitted("a", 4)
    assert batcher_of(request).plan_chunks(budget, 0, 0.0) == ([], [])
    assert request.state is RequestState.ADMITTED
    assert request.last_step_id == -1


def test_targets_of_several_choices() -> None:
    forked = admitted("a", 2, choices=(1, 4, 5), num_slots=3)
    (chunk,), _ = batcher_of(forked).plan_chunks(10, 0, 0.0)
    assert targets(chunk) == (SampleTarget(10, 1), SampleTarget(11, 4), SampleTarget(12, 5))
    one_slot = admitted("b", 2, choices=(1, 4, 5), num_slots=1)  # a prefill engine
    (chunk,), _ = batcher_of(one_slot).plan_chunks(10, 0, 0.0)
    assert targets(chunk) == (SampleTarget(10, 1), SampleTarget(10, 4), SampleTarget(10, 5))


def test_a_discarded_prompt_is_gone_in_any_stage() -> None:
    a, b, c = admitted("a", 6), admitted("b", 5), admitted("c", 4)
    batcher = batcher_of(a, b, c)
    batcher.plan_chunks(4, 0, 0.0)
    batcher.discard(b)
    assert batcher.num_pending_tokens == 2 + 4
    batcher.discard(a)  # half done
    batcher.discard(a)
    batcher.discard(admitted("unknown", 3))
    assert batcher.num_pending_tokens == 4
    assert spans(batcher.plan_chunks(9, 1, 0.0)[0]) == [("c", 0, 4)]


def test_clients_share_the_steps_and_what_was_begun_is_finished_first() -> None:
    first, *requests = [admitted(name, 6, client=name[0]) for name in ("x1", "x2", "x3", "y1")]
    requests.append(admitted("urgent", 6, client="u", priority=1))
    batcher = batcher_of(first)
    batcher.plan_chunks(4, 0, 0.0)
    for request in requests:
        batcher.add(request)
    chunks, completed = batcher.plan_chunks(100, 1, 0.0)
    assert [chunk.request_id for chunk in chunks] == ["x1", "urgent", "x2", "y1", "x3"]
    assert len(completed) == 5


def taken(lengths: list[int], budget: int) -> list[int]:
    """Tokens of each prompt in a step, by cutting every one out in full, with what is left and without."""
    tokens: list[int] = []
    for length in lengths:
        room = budget - sum(tokens)
        if room <= 0 or (tokens and len(cut(length, room, budget)) > len(cut(length, budget, budget))):
            break
        tokens.append(min(length, room))
    return tokens


def cut(length: int, room: int, budget: int) -> list[int]:
    pieces = [min(length, room)]
    while sum(pieces) < length:
        pieces.append(min(length - sum(pieces), budget))
    return pieces


@pytest.mark.parametrize("seed", range(30))
def test_random_prompts_are_covered_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    batcher = PrefillBatcher()
    arrived: list[Request] = []
    given_up: set[str] = set()
    planned: dict[str, list[int]] = {}
    finished: list[str] = []
    step_id = 0
    while step_id < 60 or len(batcher):
        if step_id < 60 and rng.random() < 0.6:
            request = admitted(f"r{len(arrived)}", rng.randint(1, 25))
            arrived.append(request)
            batcher.add(request)
        if rng.random() < 0.1 and arrived:
            request = rng.choice(arrived)
            if request.request_id not in finished:
                given_up.add(request.request_id)
                batcher.discard(request)
        waiting = [r for r in arrived if r.request_id not in given_up and r.request_id not in finished]
        pending = sum(r.prompt_len - len(planned.get(r.request_id, [])) for r in waiting)
        assert batcher.num_pending_tokens == pending
        budget = rng.randint(-2, 12)
        chunks, completed = batcher.plan_chunks(budget, step_id, 0.0)
        # Only the oldest are served, each once.
        assert [chunk.request_id for chunk in chunks] == [r.request_id for r in waiting[: len(chunks)]]
        lengths = [r.prompt_len - len(planned.get(r.request_id, [])) for r in waiting]
        assert [len(chunk.token_ids) for chunk in chunks] == taken(lengths, budget)
        for chunk in chunks:
            so_far = planned.setdefault(chunk.request_id, [])
            assert chunk.start == len(so_far)
            so_far += chunk.token_ids
        finished += [request.request_id for request in completed]
        step_id += 1
    for request in arrived:
        if request.request_id not in given_up:
            assert tuple(planned[request.request_id]) == request.spec.prompt_ids
    assert finished == [r.request_id for r in arrived if r.request_id not in given_up], "first come first served"
