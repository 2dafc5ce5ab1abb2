"""Each rule equals transformers' processor, or the plain formula, on the same logits; no row disturbs another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replicas.sampling.draw import SamplingBatch, sample
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.sampled_tokens import NOT_A_TOKEN, NOTHING_ALLOWED, sample_tokens
from replicas.sampling.slot_state import SlotState
from scheduler.plan import RuleContext, SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams
from scheduler.thinking_budget import ThinkingBudget
from tests.replicas.rule_reference import Row, expected
from tests.replicas.test_sampling import chi_square, chi_square_limit

VOCAB_SIZE = 97
STOPS = frozenset({5, 96})
RULES = {
    "logit_bias": SamplingParams(logit_bias=((3, 7.5), (90, -100.0), (0, 1.0))),
    "allowed": SamplingParams(allowed_token_ids=(4, 5, 17, 96)),
    "bad words": SamplingParams(bad_words=((9,), (1, 2), (3,), (2, 1, 2), (4, 4, 4, 4), (0, 2))),
    "min_tokens": SamplingParams(min_tokens=6),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "repetition below 1": SamplingParams(repetition_penalty=0.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.3),
    "presence and frequency": SamplingParams(presence_penalty=-0.5, frequency_penalty=0.8),
    "thinking": SamplingParams(thinking=ThinkingBudget(2, 3, 4)),
    "thinking that the prompt opened": SamplingParams(thinking=ThinkingBudget(4, 3, 9, True)),
    "no thinking": SamplingParams(thinking=ThinkingBudget(0, 3, 4, True), allowed_token_ids=(5, 17)),
    "all": SamplingParams(
        logit_bias=((3, 7.5), (1, -2.0)),
        bad_words=((9,), (1, 2), (2, 1, 2)),
        allowed_token_ids=tuple(range(60)),
        min_tokens=6,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        thinking=ThinkingBudget(1, 9, 40),
    ),
    "none": SamplingParams(),
}


def changed(logits: torch.Tensor, rows: Sequence[Row], slots: SlotState | None = None) -> torch.Tensor:
    """What the rules make of logits. The outputs come to the slots as a runner's do: token by token."""
    slots = slots or SlotState(len(rows), 1, 200)
    places = feed(slots, rows)
    result = logits.clone()
    slots.rules.apply(result, places)
    return result


def feed(slots: SlotState, rows: Sequence[Row]) -> list[SamplePlace]:
    inits = []
    for slot, row in enumerate(rows):
        output_start = len(row.prompt) - row.num_output_in_prompt
        inits.append(SlotInit(slot, 0, row.params, None, RuleContext(row.prompt, output_start, row.stop_token_ids)))
    slots.apply(StepPlan(0, tuple(inits), (), (), ()))
    for index in range(max(len(row.output) for row in rows)):
        having = [(slot, row) for slot, row in enumerate(rows) if index < len(row.output)]
        places = [SamplePlace(slot, 0, len(row.prompt) + index, slot) for slot, row in having]
        slots.store_tokens(places, torch.tensor([row.output[index] for _, row in having]))
    return [SamplePlace(slot, 0, len(row.prompt) + len(row.output), slot) for slot, row in enumerate(rows)]


def random_rows(seed: int, choose: Callable[[random.Random], SamplingParams], num_rows: int = 40) -> list[Row]:
    """Few different tokens, so that they repeat and bad words are often about to be completed."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.choice([0, 1, 2, 3, 4, 9, 40, 96]) for _ in range(rng.randint(low, high)))

    rows = []
    for _ in range(num_rows):
        prompt = tokens(1, 30)
        rows.append(Row(choose(rng), prompt, tokens(0, 25), rng.choice([0, 0, rng.randint(0, len(prompt) - 1)]), STOPS))
    return rows


def logits_of(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_its_reference(name: str) -> None:
    rows = random_rows(1, lambda _: RULES[name])
    logits = logits_of(1, len(rows))
    got = changed(logits, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(got[index], expected(logits[index], row), rtol=1e-6, atol=1e-5)
    assert torch.equal(got, logits) == (name == "none"), "this entry changes no row: give it parameters that do"


def test_rows_with_different_rules_do_not_disturb_each_other() -> None:
    rows = random_rows(2, lambda rng: rng.choice(list(RULES.values())), 60)
    logits = logits_of(2, len(rows))
    got = changed(logits, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(got[index], expected(logits[index], row), rtol=1e-6, atol=1e-5)
        assert torch.equal(got[index], changed(logits[index : index + 1], [row])[0])


def test_a_slot_forgets_the_rules_of_its_last_sequence() -> None:
    slots = SlotState(8, 1, 200)
    logits = logits_of(3, 8)
    changed(logits, random_rows(3, lambda _: RULES["all"], 8), slots)
    rows = random_rows(4, lambda rng: RULES[rng.choice(["none", "repetition", "presence"])], 8)
    got = changed(logits, rows, slots)
    for index, row in enumerate(rows):
        torch.testing.assert_close(got[index], expected(logits[index], row), rtol=1e-6, atol=1e-5)


def test_the_first_tokens_of_a_prompt_obey_the_prompts_own_slot_and_part_in_their_own() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=3.0, min_tokens=1)
    slots = SlotState(3, 1, 20)
    context = RuleContext((7, 8), 2, STOPS)
    inits = tuple(SlotInit(slot, slot, params, None, context) for slot in range(3))
    slots.apply(StepPlan(0, inits, (), (), ()))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [5, 11, 12]] = torch.tensor([9.0, 8.0, 7.0])  # 5 is a stop token
    places = [SamplePlace(0, choice, 2, choice) for choice in range(3)]
    choice = sample_tokens(logits.expand(3, -1).clone(), places, slots)
    assert choice.read_tokens() == [11, 11, 11]
    slots.rules.store([SamplePlace(2, 2, 2, 2)], torch.tensor([40]))  # choice 2 got another one
    logits[0, 40] = 8.5
    places = [SamplePlace(slot, slot, 3, slot) for slot in range(3)]
    assert sample_tokens(logits.expand(3, -1).clone(), places, slots).read_tokens() == [5, 5, 5]
    logits[0, 5] = 0.0
    places = [SamplePlace(slot, slot, 3, slot) for slot in range(3)]
    assert sample_tokens(logits.expand(3, -1).clone(), places, slots).read_tokens() == [40, 40, 11]


def test_min_tokens_counts_output_of_earlier_attempts() -> None:
    logits = logits_of(5, 1)
    for num_generated, is_held_back in ((0, True), (5, True), (6, False), (9, False)):
        row = Row(RULES["min_tokens"], (1,) * 12, (), num_generated, STOPS)
        assert bool(changed(logits, [row])[0, sorted(STOPS)].isneginf().all()) == is_held_back


def test_rules_that_leave_nothing_are_told_from_broken_logits() -> None:
    rows = [
        Row(SamplingParams(allowed_token_ids=(5,), min_tokens=3), (1, 2), stop_token_ids=STOPS),
        Row(SamplingParams(0.0, allowed_token_ids=(5,), bad_words=((5,),)), (1, 2)),
        Row(SamplingParams(presence_penalty=1.0), (1, 2)),
        Row(SamplingParams(), (1, 2)),
        Row(SamplingParams(), (1, 2)),
    ]
    logits = logits_of(6, 5)
    logits[2:4, 50] = torch.nan
    slots = SlotState(5, 1, 20)
    tokens = sample_tokens(logits, feed(slots, rows), slots).read_tokens()
    assert tokens[:4] == [NOTHING_ALLOWED, NOTHING_ALLOWED, NOT_A_TOKEN, NOT_A_TOKEN]
    assert tokens[4] >= 0
    assert slots.last_token.min() >= 0


def test_a_choice_that_fails_leaves_the_slots_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the step can be run again in pieces."""
    slots = SlotState(1, 1, 200)
    places = feed(slots, [Row(SamplingParams(temperature=0.0, num_logprobs=2), (4, 5, 6), (7,))])
    before = slots.last_token.clone()
    logits = logits_of(3, 1)
    first = sample_tokens(logits.clone(), places, slots).read_tokens()
    assert slots.last_token.tolist() == first
    slots.last_token.copy_(before)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("replicas.sampling.sampled_tokens.TokenScores.of", out_of_memory)
    with pytest.raises(MemoryError):
        sample_tokens(logits, places, slots)
    assert slots.last_token.tolist() == before.tolist() != first


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_greedy_and_sampled_choices_obey(temperature: float) -> None:
    rows = random_rows(7, lambda _: replace(RULES["all"], temperature=temperature, seed=3))
    logits = logits_of(7, len(rows))
    slots = SlotState(len(rows), 1, 200)
    places = feed(slots, rows)
    tokens = sample_tokens(logits.clone(), places, slots).read_tokens()
    scores = torch.stack([expected(logits[i], row) for i, row in enumerate(rows)])
    parameters = [(row.params, 0, place.position) for row, place in zip(rows, places, strict=True)]
    assert tokens == sample(scores, SamplingBatch.from_rows(parameters)).tolist()
    if temperature == 0.0:
        assert tokens == scores.argmax(-1).tolist()


# -- min-p, and everything at once ------------------------------------------------------------------------------


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' warpers, float32 [R, V], in our order."""
    ids = torch.zeros(len(scores), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return scores


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, min_p=0.05, seed=31),
        SamplingParams(0.9, top_k=-1, min_p=0.05, seed=32),
        SamplingParams(2.0, top_k=12, top_p=0.9, min_p=0.02, seed=33),
        SamplingParams(1.5, top_k=25, top_p=0.0, min_p=0.01, seed=34),
        SamplingParams(1.0, min_p=1.0, seed=35),
    ],
)
def test_draws_follow_min_p_with_top_k_and_top_p(params: SamplingParams) -> None:
    logits = logits_of(8, 1) / 2
    rows = [(params, 0, position) for position in range(10_000)]
    drawn = sample(logits.expand(len(rows), -1), SamplingBatch.from_rows(rows)).tolist()
    probabilities = warped(logits, params).softmax(-1)[0]
    assert set(drawn) <= set(probabilities.nonzero().flatten().tolist())
    if params.min_p == 1.0 or params.top_p == 0.0:
        assert set(drawn) == {int(logits.argmax())}
        return
    assert 3 < int((probabilities > 0).sum()) < VOCAB_SIZE
    statistic, degrees = chi_square(drawn, probabilities.tolist())
    assert statistic < chi_square_limit(degrees)


def test_min_p_of_one_row_is_nothing_to_the_others() -> None:
    logits = logits_of(9, 30)
    rows = [(SamplingParams(1.0, top_k=row % 3 * 5, min_p=row % 2 * 0.3, seed=row), 0, row) for row in range(30)]
    alone = [int(sample(logits[i : i + 1], SamplingBatch.from_rows([rows[i]]))) for i in range(30)]
    assert sample(logits, SamplingBatch.from_rows(rows)).tolist() == alone


def test_ten_thousand_draws_with_everything_at_once() -> None:
    params = replace(RULES["all"], temperature=1.4, top_k=30, top_p=0.95, min_p=0.01, seed=77)
    num_draws = 10_000
    row = Row(params, (1, 2, 3, 3), (1, 1, 40))
    logits = logits_of(10, 1) / 3
    slots = SlotState(1, 1, 200)
    (place,) = feed(slots, [row])
    scores = logits.clone()
    slots.rules.apply(scores, [place])
    # The same slot again and again: only the choice, that is the noise, differs.
    places = [place._replace(choice=choice) for choice in range(num_draws)]
    tokens = sample(scores.expand(num_draws, -1), slots.sampling_batch(places)).tolist()
    probabilities = warped(expected(logits[0], row)[None], params).softmax(-1)[0].tolist()
    statistic, degrees = chi_square(tokens, probabilities)
    assert degrees > 5
    assert statistic < chi_square_limit(degrees)


@pytest.mark.parametrize("num_generated", [0, 3])
def test_thinking_is_over_at_its_budget_and_not_before(num_generated: int) -> None:
    """Also where the output of an earlier attempt is part of the prompt."""
    budget = ThinkingBudget(3, 9, 40)
    logits = logits_of(5, 1)
    output = (9, 1, 2, 3, 4)
    for length in range(len(output) + 1):
        prompt = (7, 7, *output[:num_generated])
        if length < num_generated:
            continue
        row = Row(SamplingParams(thinking=budget), prompt, output[num_generated:length], num_generated)
        is_over = length >= 4  # opened, and three tokens
        got = changed(logits, [row])[0]
        assert (got[40] == 0.0 and got.isneginf().sum() == VOCAB_SIZE - 1) == is_over
        assert torch.equal(got, logits[0]) == (not is_over)
    closed = Row(SamplingParams(thinking=budget), (7,), (9, 1, 2, 3, 40, 1, 2, 3, 4))
    assert torch.equal(changed(logits, [closed]), logits)
    again = Row(SamplingParams(thinking=budget), (7,), (9, 1, 2, 3, 40, 9, 2, 3, 4))
    assert changed(logits, [again])[0].isneginf().sum() == VOCAB_SIZE - 1
