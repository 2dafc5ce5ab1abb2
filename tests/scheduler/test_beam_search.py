"""The rules of beam search, against a slow reading of the published ones, against plain enumeration, and one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from scheduler.beam_search import BeamParams, BeamSearch, Candidate
from tests.scheduler.brute_beam_search import Model, random_model, search

NO_STOPS: frozenset[int] = frozenset()


def best_of(log_probs: list[float], count: int) -> list[Candidate]:
    """What a runner offers of one row."""
    return sorted(enumerate(log_probs), key=lambda candidate: -candidate[1])[:count]


def run(model: Model, params: BeamParams, stops: frozenset[int], max_tokens: int) -> BeamSearch:
    state = BeamSearch(params, stops, max_tokens)
    while not state.is_over:
        count = params.num_candidates(len(stops))
        state = state.advance([best_of(model(beam.token_ids), count) for beam in state.beams])
    return state


def random_case(seed: int) -> tuple[Model, BeamParams, frozenset[int], int]:
    rng = random.Random(seed)
    num_stops = rng.choice([0, 1, 1, 2, 3])
    width = rng.choice([1, 2, 3, 4, 4])
    # As many tokens as transformers ranks, so that it never has to go on with a sentinel.
    vocab_size = max(2, 1 + num_stops) * width + rng.randint(0, 3)
    penalty = rng.choice([1.0, 0.0, 0.5, 2.0, -0.7, rng.uniform(-1.5, 1.5)])
    params = BeamParams(width, penalty, rng.choice([True, False, "never"]))
    stops = frozenset(rng.sample(range(vocab_size), num_stops))
    return random_model(seed, vocab_size, rng.choice([0.3, 1.0, 3.0])), params, stops, rng.randint(1, 9)


@pytest.mark.parametrize("first_seed", range(0, 1500, 300))
def test_equals_the_published_rules(first_seed: int) -> None:
    reasons = set()
    for seed in range(first_seed, first_seed + 300):
        model, params, stops, max_tokens = random_case(seed)
        expected = search(model, params.width, params.length_penalty, params.early_stopping, stops, max_tokens)
        state = run(model, params, stops, max_tokens)
        assert [h.token_ids for h in state.hypotheses] == [text for text, _ in expected], f"seed {seed}"
        assert [h.score for h in state.hypotheses] == pytest.approx([score for _, score in expected], rel=1e-9)
        for hypothesis in state.hypotheses:
            assert hypothesis.finish_reason == ("stop" if hypothesis.token_ids[-1] in stops else "length")
            assert not stops.intersection(hypothesis.token_ids[:-1])
        reasons.update(h.finish_reason for h in state.hypotheses)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_with_room_for_everything_it_finds_the_best_of_all(seed: int, length_penalty: float) -> None:
    vocab_size, max_tokens, stops = 3, 4, frozenset({1})
    model = random_model(seed, vocab_size)
    state = run(model, BeamParams(vocab_size**max_tokens, length_penalty, "never"), stops, max_tokens)
    scored = {}
    for text in itertools.chain.from_iterable(
        itertools.product(range(vocab_size), repeat=length) for length in range(1, max_tokens + 1)
    ):
        ends = text[-1] in stops or len(text) == max_tokens
        if ends and not stops.intersection(text[:-1]):
            total = sum(model(text[:index])[token] for index, token in enumerate(text))
            scored[text] = total / len(text) ** length_penalty
    best_first = sorted(scored, key=lambda text: -scored[text])
    assert [h.token_ids for h in state.hypotheses] == best_first


def test_a_stop_token_beyond_the_first_width_ranks_is_dropped() -> None:
    state = BeamSearch(BeamParams(2), frozenset({9}), max_tokens=5)
    state = state.advance([[(1, -0.1), (2, -0.2), (9, -0.3)]])
    assert [beam.token_ids for beam in state.beams] == [(1,), (2,)]
    assert state.hypotheses == ()


def test_a_stop_token_among_them_makes_a_hypothesis_and_the_next_best_lives_on() -> None:
    state = BeamSearch(BeamParams(2), frozenset({9}), max_tokens=5)
    state = state.advance([[(1, -0.1), (9, -0.2), (2, -0.3)]])
    assert [(beam.token_ids, beam.parent) for beam in state.beams] == [((1,), 0), ((2,), 0)]
    assert [(h.token_ids, h.score, h.finish_reason) for h in state.hypotheses] == [((9,), -0.2, "stop")]


def test_a_beam_may_have_all_children() -> None:
    state = BeamSearch(BeamParams(2), NO_STOPS, max_tokens=5).advance([[(1, -0.1), (2, -5.0)]])
    state = state.advance([[(3, -0.1), (4, -0.2)], [(5, -0.1), (6, -0.2)]])
    assert [(beam.token_ids, beam.parent) for beam in state.beams] == [((1, 3), 0), ((1, 4), 0)]
    assert [beam.log_prob for beam in state.beams] == pytest.approx([-0.2, -0.3])


def test_ties_go_to_the_better_beam_and_then_to_the_order_of_its_candidates() -> None:
    state = BeamSearch(BeamParams(2), NO_STOPS, max_tokens=5).advance([[(7, -1.0), (3, -1.0)]])
    assert [beam.token_ids for beam in state.beams] == [(7,), (3,)]
    state = state.advance([[(5, -1.0), (4, -1.0)], [(2, -1.0), (1, -1.0)]])
    assert [beam.token_ids for beam in state.beams] == [(7, 5), (7, 4)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        (True, 1.0, True),  # two hypotheses are enough
        (False, 1.0, True),  # -3 / 2 is no better than -1.2
        (False, 0.0, True),
        ("never", 1.0, False),  # but -3 / 10 would be
        ("never", 0.0, True),
        ("never", -1.0, True),
    ],
)
def test_when_it_is_over(early_stopping: Any, length_penalty: float, is_over: bool) -> None:
    params = BeamParams(2, length_penalty, early_stopping)
    state = BeamSearch(params, frozenset({8, 9}), max_tokens=10)
    state = state.advance([[(8, -1.0), (1, -1.1), (9, -4.0), (2, -4.1)]])
    assert not state.is_over, "one hypothesis is not enough"
    state = state.advance([[(9, -0.1), (8, -1.2), (1, -1.9), (2, -9.0)], [(1, -5.0), (2, -6.0), (8, -7.0), (9, -7.5)]])
    assert len(state.hypotheses) == 2
    assert state.is_over == is_over


def test_max_tokens_ends_every_beam() -> None:
    state = BeamSearch(BeamParams(3), NO_STOPS, max_tokens=1).advance([[(1, -1.0), (2, -2.0), (3, -3.0)]])
    assert state.is_over
    assert [h.token_ids for h in state.hypotheses] == [(1,), (2,), (3,)]
    assert {h.finish_reason for h in state.hypotheses} == {"length"}


def test_fewer_candidates_than_beams_narrow_the_search_and_it_widens_again() -> None:
    state = BeamSearch(BeamParams(4), NO_STOPS, max_tokens=5)
    state = state.advance([[(0, -0.5), (1, -1.0)]])
    assert len(state.beams) == 2
    state = state.advance([[(0, -0.5), (1, -1.0)]] * 2)
    assert len(state.beams) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1.0, False), "width"),
        ((2, float("nan"), False), "length_penalty"),
        ((2, 11.0, False), "length_penalty"),
        ((2, 1.0, "always"), "early_stopping"),
        ((2, 1.0, 1), "early_stopping"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BeamParams(*arguments)
