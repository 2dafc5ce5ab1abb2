"""Rows with guesses: every token is the one that would have been chosen without them, right guesses or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.step_inputs import build_step_inputs
from replicas.sampling.sample_place import SamplePlace, counting
from replicas.sampling.slot_state import SlotState
from scheduler.plan import Accepted, RuleContext, SampleTarget, Slice, SlotInit, StepOutput, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_model import save_tiny_model, tiny_settings

CPU = torch.device("cpu")
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((31 * i + 5) % 512 for i in range(10))
NUM_GREEDY = 16


@dataclass(frozen=True, slots=True)
class Greedy:
    """What transformers alone says: its greedy tokens behind PROMPT, and the logits that each was chosen by."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(tiny_settings("decode", folder).model, CPU)


@pytest.fixture(scope="module")
def greedy(folder: Path) -> Greedy:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NUM_GREEDY):
            logits = reference(torch.tensor([ids])).logits[0]
            ids.append(int(logits[-1].argmax()))
    return Greedy(tuple(ids[len(PROMPT) :]), logits[len(PROMPT) - 1 :])


def make_runner(loaded: LoadedModel) -> ModelRunner:
    """Wherever nobody has written, its pool holds what is no number."""
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(BLOCK_SIZE), 48, CPU), num_slots=6, max_model_len=64)
    runner.pool.tensor.fill_(torch.nan)
    return runner


def begin(
    runner: ModelRunner, slot: int = 0, sampling: SamplingParams = GREEDY, prompt: tuple[int, ...] = PROMPT
) -> int:
    """The prompt in a slot whose blocks lie apart; its first token."""
    init = SlotInit(slot, slot, sampling, None, RuleContext(prompt, len(prompt)))
    table = TableWrite(slot, 0, tuple((7 * (8 * slot + i)) % 48 for i in range(8)))
    chunk = Slice.of_prompt(f"r{slot}", slot, 0, prompt, (SampleTarget(slot, slot),))
    (token,) = runner.launch(StepPlan(0, (init,), (table,), (), (chunk,))).result().tokens
    return token.token_id


def guessing(start: int, guesses: tuple[int, ...], slot: int = 0) -> Slice:
    count = 1 + len(guesses)
    return Slice(f"r{slot}", slot, slot, start, count, count, guesses)


def run(runner: ModelRunner, *slices: Slice) -> StepOutput:
    return runner.launch(StepPlan(1, (), (), (), slices)).result()


def ids_of(output: StepOutput, slot: int = 0) -> tuple[int, ...]:
    return tuple(token.token_id for token in output.tokens if token.request_id == f"r{slot}")


@pytest.mark.parametrize("num_guesses", [1, 2, 3, 6, 13])
def test_true_guesses_are_all_accepted(loaded: LoadedModel, greedy: Greedy, num_guesses: int) -> None:
    """The true continuation as the guess: k + 1 right tokens in one step, by transformers' own logits."""
    runner = make_runner(loaded)
    assert begin(runner) == greedy.tokens[0]
    row = guessing(len(PROMPT), greedy.tokens[1 : 1 + num_guesses])
    forwarded = runner.forward(StepPlan(1, (), (), (), (row,)))
    assert forwarded.logits is not None
    torch.testing.assert_close(forwarded.logits, greedy.logits[1 : num_guesses + 2], atol=1e-4, rtol=1e-4)
    output = runner.choose(forwarded).result()
    assert ids_of(output) == greedy.tokens[1 : num_guesses + 2]
    assert output.accepted == (Accepted("r0", 0, num_guesses + 1, num_guesses + 1),)
    if num_guesses + 2 < NUM_GREEDY:  # and it goes on from there, a token at a time
        later = run(runner, Slice("r0", 0, 0, len(PROMPT) + num_guesses + 1))
        assert ids_of(later) == (greedy.tokens[num_guesses + 2],)
        assert later.accepted == ()


@pytest.mark.parametrize(("num_guesses", "wrong"), [(1, 0), (3, 0), (3, 2), (6, 1), (6, 5)])
def test_behind_a_wrong_guess_nothing_counts(loaded: LoadedModel, greedy: Greedy, num_guesses: int, wrong: int) -> None:
    """What was written behind it, over the ends of blocks, is never seen: the rest is transformers' text, too."""
    runner = make_runner(loaded)
    begin(runner)
    guesses = list(greedy.tokens[1 : 1 + num_guesses])
    guesses[wrong] = (guesses[wrong] + 1) % 512
    output = run(runner, guessing(len(PROMPT), tuple(guesses)))
    assert ids_of(output) == greedy.tokens[1 : wrong + 2], "those before it, and the one in its place"
    assert output.accepted == (Accepted("r0", 0, wrong + 1, num_guesses + 1),)
    for index in range(wrong + 2, NUM_GREEDY):
        forwarded = runner.forward(StepPlan(2, (), (), (), (Slice("r0", 0, 0, len(PROMPT) + index - 1),)))
        assert forwarded.logits is not None
        torch.testing.assert_close(forwarded.logits[0], greedy.logits[index], atol=1e-4, rtol=1e-4)
        assert ids_of(runner.choose(forwarded).result()) == (greedy.tokens[index],)


def test_rows_with_and_without_guesses_and_a_prompt_side_by_side(loaded: LoadedModel, greedy: Greedy) -> None:
    """In any order of the rows; each gets what it gets alone."""
    prompts = {slot: tuple((slot * 97 + 13 * i) % 512 for i in range(5 + 4 * slot)) for slot in (1, 2, 3)}
    alone: dict[int, list[int]] = {}
    for slot, prompt in prompts.items():
        runner = make_runner(loaded)
        alone[slot] = [begin(runner, slot, prompt=prompt)]
        alone[slot] += [ids_of(run(runner, Slice(f"r{slot}", slot, slot, len(prompt) + i)), slot)[0] for i in range(3)]
    runner = make_runner(loaded)
    begin(runner)
    for slot in (1, 2):
        assert begin(runner, slot, prompt=prompts[slot]) == alone[slot][0]
    table = TableWrite(3, 0, tuple((7 * (8 * 3 + i)) % 48 for i in range(8)))
    wrong = (alone[2][1], (alone[2][2] + 1) % 512, 5)
    slices = (
        guessing(len(PROMPT), greedy.tokens[1:4]),
        Slice("r1", 1, 1, len(prompts[1])),
        guessing(len(prompts[2]), wrong, slot=2),
        Slice.of_prompt("r3", 3, 0, prompts[3], (SampleTarget(3, 3), SampleTarget(4, 0))),
    )
    plan = StepPlan(1, (SlotInit(3, 3, GREEDY, None), SlotInit(4, 0, GREEDY, None)), (table,), (), slices)
    output = runner.launch(plan).result()
    assert [ids_of(output, slot) for slot in (0, 1, 2)] == [greedy.tokens[1:5], (alone[1][1],), tuple(alone[2][1:3])]
    assert [(t.choice, t.token_id) for t in output.tokens if t.request_id == "r3"] == [
        (3, alone[3][0]),
        (0, alone[3][0]),
    ]
    assert output.accepted == (Accepted("r0", 0, 4, 4), Accepted("r2", 2, 2, 4))
    assert runner._slots.last_token[:5].tolist() == [greedy.tokens[4], alone[1][1], alone[2][2], *[alone[3][0]] * 2]


SAMPLED = {
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "penalties": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.8, presence_penalty=1.5, top_k=20),
    "frequency, bad words": SamplingParams(temperature=0.0, frequency_penalty=1.9, bad_words=((3, 4), (9,))),
    "log-probabilities": SamplingParams(temperature=1.0, seed=11, top_p=0.9, num_logprobs=3, repetition_penalty=1.3),
}


@pytest.mark.parametrize("way", SAMPLED)
@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_each_position_is_drawn_by_its_own_history(loaded: LoadedModel, way: str, wrong: int | None) -> None:
    """The noise of its position, and rules that look back at the guesses in front of it."""
    runner = make_runner(loaded)
    tokens = [begin(runner, sampling=SAMPLED[way])]
    expected = []
    for index in range(8):
        expected += run(runner, Slice("r0", 0, 0, len(PROMPT) + index)).tokens
    tokens += [token.token_id for token in expected]
    assert len(set(tokens)) > 3
    runner = make_runner(loaded)
    assert begin(runner, sampling=SAMPLED[way]) == tokens[0]
    guesses = tokens[1:6]
    if wrong is not None:
        guesses[wrong] = (guesses[wrong] + 1) % 512
    num_right = 6 if wrong is None else wrong + 1
    got = list(run(runner, guessing(len(PROMPT), tuple(guesses))).tokens)
    assert len(got) == num_right
    for index in range(num_right, 8):
        got += run(runner, Slice("r0", 0, 0, len(PROMPT) + index)).tokens
    assert [token.token_id for token in got] == tokens[1:9]
    for token, same in zip(got, expected, strict=True):
        assert (token.logprobs is None) == (SAMPLED[way].num_logprobs is None)
        if token.logprobs is not None and same.logprobs is not None:
            assert token.logprobs.logprob == pytest.approx(same.logprobs.logprob, abs=1e-4)


def test_a_rule_sees_the_guess_in_front(loaded: LoadedModel, greedy: Greedy) -> None:
    """The best second token is forbidden behind the first one, which is only guessed when the second is chosen."""
    first, second = greedy.tokens[1:3]
    sampling = SamplingParams(temperature=0.0, bad_words=((first, second),))
    one_by_one, at_once = make_runner(loaded), make_runner(loaded)
    begin(one_by_one, sampling=sampling)
    expected = [ids_of(run(one_by_one, Slice("r0", 0, 0, len(PROMPT) + index)))[0] for index in range(4)]
    assert expected[0] == first
    assert expected[1] != second
    begin(at_once, sampling=sampling)
    assert ids_of(run(at_once, guessing(len(PROMPT), tuple(expected[:3])))) == tuple(expected)
    begin(at_once, sampling=sampling)
    assert ids_of(run(at_once, guessing(len(PROMPT), (first, second)))) == tuple(expected[:2]), "a wrong guess"


def test_a_slot_keeps_one_token_and_is_asked_for_no_more() -> None:
    slots = SlotState(1, 4, 16)
    row = Slice("r", 0, 0, 4, num_tokens=3, num_sampled=3, token_ids=(7,))
    with pytest.raises(ValueError, match="r: 3 tokens, 1 known, but slots keep only one"):
        build_step_inputs(StepPlan(0, (), (), (), (row,)), slots, BLOCK_SIZE)


def test_what_counts_is_told_slice_by_slice() -> None:
    slices = (guessing(4, (5, 6)), Slice("r1", 1, 1, 9), guessing(7, (1,), slot=2))
    places = SamplePlace.all_of(StepPlan(0, (), (), (), slices))
    assert [(place.slot, place.position, place.guess) for place in places] == [
        (0, 5, 5), (0, 6, 6), (0, 7, None), (1, 10, None), (2, 8, 1), (2, 9, None)
    ]  # fmt: skip
    assert counting(places, [5, 6, 1, 2, 1, 4]) == [True] * 6
    assert counting(places, [5, 7, 1, 2, 0, 4]) == [True, True, False, True, True, False]
    assert counting(places, [-1, 6, 1, 2, 1, 4]) == [True, False, False, True, True, True], "no token is no guess"
    behind_right = counting(places, [5, -2, 1, 2, 1, -1])
    assert behind_right == [True, False, False, True, True, False], "the next row comes there again, by itself"
    assert counting(places, [5, 6, -1, -2, 1, 4])[3:] == [True] * 3, "what stands behind no guess says why it failed"
