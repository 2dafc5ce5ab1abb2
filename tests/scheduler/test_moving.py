"""Requests stop at one scheduler and go on at another: nothing is lost or kept, and no promise is broken."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.capabilities import DECODE
from scheduler.moved_choice import MovedChoice, check_moved
from scheduler.moving import MovedOut
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.prefix_book import PrefixOptions
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from tests.scheduler.short_requests import STOP, decode_scheduler, limits, make_request, running, sampled, step

Texts = dict[str, dict[int, list[int]]]  # by request, by choice
SHORT = AdmissionPolicy(quantile=0.3, min_samples=1)


def moved_request(request: Request, name: str, num_generated: int, choices: tuple[int, ...]) -> Request:
    """What the other scheduler is asked for."""
    again = make_request(name, request.prompt_len, request.spec.max_tokens, choices, local_prefill=False)
    again.num_generated = num_generated
    return again


def choices_of(moved: MovedOut, token_ids: dict[int, list[int]]) -> tuple[MovedChoice, ...]:
    return tuple(
        MovedChoice(choice, tuple(token_ids[choice][:known]), places) for choice, known, places in moved.tables
    )


def test_it_stops_between_two_tokens_whatever_is_in_flight() -> None:
    scheduler = decode_scheduler(limits(), lag=1)
    request = running(scheduler, make_request("r", 6, 9, (0, 1), local_prefill=False))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    scheduler.move_out("r")
    assert scheduler.why_stays("r") == "it is not running"
    assert scheduler.plan(0.0) is None, "no more rows"
    scheduler.commit(sampled(first), 0.0)
    assert scheduler.take_moved_out(0.0) == ()
    scheduler.commit(sampled(second), 0.0)
    (moved,) = scheduler.take_moved_out(0.0)
    # 8 positions are written: one block of the prompt that both have, one of each choice, in which the prompt ends.
    assert [(choice, known, places) for choice, known, places in moved.tables] == [(0, 3, (0, 1)), (1, 3, (0, 2))]
    assert request.state is RequestState.LEASED
    assert scheduler.ledger().used_slots == 0
    assert scheduler.allocator.counts().transfer_only == 3
    scheduler.lease_ended("r", 0.0)
    assert scheduler.allocator.num_free == 20
    assert scheduler.ledger().promised_blocks == 0


def test_what_ends_while_it_stops_is_not_moved() -> None:
    scheduler = decode_scheduler(limits(), lag=1)
    for name, ends in (("stopped", True), ("cancelled", False)):
        running(scheduler, make_request(name, 6, 9, local_prefill=False))
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.move_out(name)
        if not ends:
            scheduler.end(name, RequestState.CANCELLED, 0.0)
        scheduler.commit(sampled(plan, STOP), 0.0)
        assert scheduler.take_moved_out(0.0) == ()
        assert scheduler.get(name) is None
    assert scheduler.allocator.num_free == 20


def test_beams_and_those_that_do_not_run_stay() -> None:
    scheduler = decode_scheduler(limits())
    assert scheduler.why_stays("nobody") == "it is over, or was never here"
    scheduler.submit(make_request("queued"), 0.0)
    assert scheduler.why_stays("queued") == "it is not running"


def test_a_choice_that_has_ended_meanwhile_holds_nothing_there() -> None:
    source, reader = (decode_scheduler(limits()) for _ in range(2))
    request = running(source, make_request("r", 6, 9, (0, 1, 2), local_prefill=False))
    again = moved_request(request, "again", 1, (0, 1, 2))
    reader.submit(again, 0.0)
    assert reader.admit(0.0) == (again,)
    plan = source.plan(0.0)
    assert plan is not None
    ids = [STOP if row.choice == 0 else 7 for row in plan.rows]
    tokens = tuple(SampledToken("r", row.choice, ids[row.choice]) for row in plan.rows)
    source.commit(StepOutput(plan.step_id, tokens), 0.0)
    source.move_out("r")
    (moved,) = source.take_moved_out(0.0)
    choices = choices_of(moved, {1: [7, 7], 2: [7, 7]})
    load = reader.begin_moved_load("again", choices, len(moved.block_ids), 0.0)
    assert (len(load.block_ids), load.num_kept) == (3, 0)
    reader.moved_in("again", choices, 0.0)
    assert [sequence.choice for sequence in again.sequences] == [1, 2, 0]
    plan, events = step(reader)
    assert [(row.choice, row.start) for row in plan.rows] == [(1, 7), (2, 7)]
    assert [(token.choice, token.index) for token in events] == [(1, 2), (2, 2)]
    while reader.get("again") is not None:
        step(reader)
    assert reader.allocator.num_free == 20
    assert reader.ledger().promised_blocks == 0


@pytest.mark.parametrize(
    ("choices", "num_blocks", "why"),
    [
        ((MovedChoice(0, (), (0,)),), 1, "0 tokens"),
        ((MovedChoice(0, (7,) * 4, (0, 1)),), 2, "2 blocks for 6"),
        ((MovedChoice(0, (7, 7), (1, 0)),), 2, "does not begin"),
        ((MovedChoice(0, (7, 7), (0, 1)),), 3, "tables of 2 blocks for 3"),
        ((MovedChoice(0, (7, 7), (0, 5)),), 2, "tables of 2 blocks"),
        ((MovedChoice(0, (7, 7), (0, 1)), MovedChoice(0, (7, 7), (0, 1))), 2, "named twice"),
    ],
)
def test_tables_that_no_engine_offers_are_refused(choices: tuple[MovedChoice, ...], num_blocks: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_moved(choices, 6, num_blocks, 4)


def test_one_that_has_grown_beyond_the_room_is_refused_and_nothing_has_changed() -> None:
    reader = decode_scheduler(limits(num_blocks=5))
    again = moved_request(make_request("r", 6, 9), "again", 1, (0,))
    reader.submit(again, 0.0)
    reader.admit(0.0)
    other = make_request("other", 1, 1)
    reader.submit(other, 0.0)
    assert reader.admit(0.0) == (other,)
    with pytest.raises(ValueError, match="it needs 4 blocks here, 3 are free"):
        reader.begin_moved_load("again", (MovedChoice(0, (7,) * 8, (0, 1, 2, 3)),), 4, 0.0)
    assert again.state is RequestState.ADMITTED
    with pytest.raises(ValueError, match="has all its tokens"):
        reader.begin_moved_load("again", (MovedChoice(0, (7,) * 9, (0, 1, 2, 3)),), 4, 0.0)


# -- at random -------------------------------------------------------------------------------------


@dataclass
class _Side:
    """One scheduler with its steps in flight, and what its requests have said."""

    scheduler: Scheduler
    in_flight: deque[StepPlan] = field(default_factory=deque)
    loading: list[tuple[str, tuple[MovedChoice, ...]]] = field(default_factory=list)

    def turn(self, rng: random.Random, texts: Texts) -> None:
        """A step."""
        self.scheduler.admit(0.0)
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            self.in_flight.append(plan)
        while self.in_flight and (plan is None or len(self.in_flight) > self.scheduler.lag):
            done = self.in_flight.popleft()
            names = [(part.request_id, choice) for part in done.slices for choice in part.sampled_choices]
            tokens = tuple([SampledToken(*name, STOP if rng.random() < 0.01 else rng.randrange(90)) for name in names])
            for token in self.scheduler.commit(StepOutput(done.step_id, tokens), 0.0).tokens:
                texts[token.request_id].setdefault(token.choice, []).append(token.token_id)
                assert token.index == len(texts[token.request_id][token.choice]) - 1
        for request_id, choices in self.loading:
            self.scheduler.moved_in(request_id, choices, 0.0)
        self.loading.clear()
        self.scheduler.take_evicted()
        self.check()

    def check(self) -> None:
        ledger = self.scheduler.ledger()
        if self.scheduler.budget.estimator is None:
            assert ledger.blocks.request + ledger.blocks.transfer_only <= ledger.promised_blocks
            assert self.scheduler.num_stalls == self.scheduler.preemption.num_swapped == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", [AdmissionPolicy(), SHORT], ids=["promised", "estimated"])
@pytest.mark.parametrize("seed", range(6))
def test_moves_at_random(lag: int, policy: AdmissionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixOptions("same") if seed % 2 else None
    size = limits(num_blocks=60, max_sequences=12, max_step_tokens=32)
    sides = [_Side(Scheduler(size, DECODE, policy, lag, 100, prefixes=cache)) for _ in range(2)]
    texts: Texts = {}
    num_moved = num_begun = 0
    for turn in range(900):
        for side in sides:
            side.turn(rng, texts)
        if turn < 700 and rng.random() < 0.2:
            choices = tuple(range(rng.choice([1, 1, 2, 3])))
            request = make_request(f"r{turn}", rng.randrange(1, 20), rng.randrange(2, 40), choices)
            texts[request.request_id] = {}
            rng.choice(sides).scheduler.submit(request, 0.0)
            num_begun += 1
        source, reader = rng.sample(sides, 2)
        movable = [r for r in source.scheduler.batch.requests if not source.scheduler.why_stays(r.request_id)]
        movable = [r for r in movable if texts[r.request_id]]
        if movable and rng.random() < 0.4:
            num_moved += _move(rng.choice(movable), source, reader, turn, rng, texts)
    for side in sides:
        ledger = side.scheduler.ledger()
        assert ledger.is_idle
        assert (ledger.promised_blocks, ledger.used_slots) == (0, 0)
        assert ledger.blocks.unowned == ledger.blocks.total
    assert num_begun > 80
    assert num_moved > 40


def _move(
    request: Request,
    source: _Side,
    reader: _Side,
    turn: int,
    rng: random.Random,
    texts: Texts,
) -> bool:
    """Whether it goes on at the reader: if that admits it at once, and it does not end first."""
    old = request.request_id
    live = tuple(s.choice for s in request.sequences if s.finish_reason is None)
    name = f"{old}-{turn}"
    again = moved_request(request, name, max(len(texts[old][choice]) for choice in live), live)
    reader.scheduler.submit(again, 0.0)
    reader.scheduler.admit(0.0)
    if again.state is not RequestState.ADMITTED:
        reader.scheduler.end(name, RequestState.CANCELLED, 0.0)
        return False
    for _ in range(rng.randrange(3)):
        source.turn(rng, texts)
        reader.turn(rng, texts)
    if source.scheduler.why_stays(old):
        reader.scheduler.end(name, RequestState.CANCELLED, 0.0)
        return False
    source.scheduler.move_out(old)
    moved: tuple[MovedOut, ...] = ()
    while not moved and source.scheduler.get(old) is not None:
        source.turn(rng, texts)
        moved = source.scheduler.take_moved_out(0.0)
    if not moved:
        reader.scheduler.end(name, RequestState.CANCELLED, 0.0)
        return False
    choices = choices_of(moved[0], texts[old])
    texts[name] = {choice.choice: list(choice.token_ids) for choice in choices}
    load = reader.scheduler.begin_moved_load(name, choices, len(moved[0].block_ids), 0.0)
    assert len(load.block_ids) == len(moved[0].block_ids)
    reader.check()
    source.check()
    source.scheduler.lease_ended(old, 0.0)
    reader.loading.append((name, choices))
    return True
