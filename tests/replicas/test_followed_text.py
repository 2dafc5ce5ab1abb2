"""Texts held against grammars: where a grammar sleeps, what a mask allows, and what comes of a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from replicas.engine.constrained_rows import ConstrainedRows, Grammars
from replicas.engine.step_isolation import run_isolated
from replicas.grammars import grammar_text
from replicas.grammars.choice_texts import ChoiceTexts
from replicas.grammars.compiled_grammar import CompiledGrammar, compile_grammar
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.mask_maker import MaskMaker
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.slot_rules import SlotRules
from scheduler.grammar import Grammar
from scheduler.plan import RuleContext, SampleTarget, Slice, SlotInit, StepOutput, StepPlan
from scheduler.sampling_params import SamplingParams
from tests.engines.tiny_tokenizer import BEGIN_ID, DONE_ID, END_ID, VOCAB_SIZE, save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB_SIZE, eos_token=[END_ID])


def empty(num_rows: int, num_words: int) -> Any:
    return np.empty((num_rows, num_words), dtype=np.int32)


def allowed(words: Any) -> set[int]:
    return set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def text_of(tokenizer: LLTokenizer, grammar: Grammar, ids: Iterable[int] = ()) -> FollowedText:
    return FollowedText(grammar, compile_grammar(tokenizer, grammar.text, GrammarFuel()), ids)


def next_ids(tokenizer: LLTokenizer, text: FollowedText) -> set[int] | None:
    """None: any."""
    held, words = MaskMaker(tokenizer, 1, empty).masks([text])
    return allowed(words[0]) if held else None


def ids_of(tokenizer: LLTokenizer, text: str) -> list[int]:
    return tokenizer.tokenize_str(text)


YES_NO = grammar_text.choice(["yes", "no"])


def test_a_text_is_a_function_of_its_tokens(tokenizer: LLTokenizer) -> None:
    """Taken one by one, all at once, from a prompt, by a copy: the same masks."""
    ids = ids_of(tokenizer, '{"a":[tru')
    grammar = Grammar(grammar_text.any_json_object())
    masks = []
    step_by_step = text_of(tokenizer, grammar)
    for token in ids:
        step_by_step.take(token)
        masks.append(next_ids(tokenizer, step_by_step))
    at_once = text_of(tokenizer, grammar, ids)
    assert next_ids(tokenizer, at_once) == masks[-1]
    twin = text_of(tokenizer, grammar, ids[:-1]).copy()
    twin.take(ids[-1])
    assert next_ids(tokenizer, twin.copy()) == masks[-1]
    assert len({frozenset(mask or ()) for mask in masks}) > 2


def test_it_sleeps_until_one_of_its_tokens(tokenizer: LLTokenizer) -> None:
    text = text_of(tokenizer, Grammar(YES_NO, begins_after=(BEGIN_ID, 77)))
    assert next_ids(tokenizer, text) is None
    for token in (5, 6, 77):
        assert next_ids(tokenizer, text) is None
        text.take(token)
    first = next_ids(tokenizer, text)
    assert first == next_ids(tokenizer, text_of(tokenizer, Grammar(YES_NO)))
    for token in ids_of(tokenizer, "no"):
        text.take(token)
    assert next_ids(tokenizer, text) == {END_ID}, "without `repeats` nothing comes behind it"


@pytest.mark.parametrize(
    ("grammar", "once", "more"),
    [
        (YES_NO, "yes", set()),
        (grammar_text.lark('start: "a" <done>'), "a<done>", set()),
        (grammar_text.choice(["a", "ab"]), "ab", set()),
        (grammar_text.json_schema({"type": "integer", "minimum": 10, "maximum": 99}), "42", set()),
    ],
)
def test_it_sleeps_again_behind_its_text(tokenizer: LLTokenizer, grammar: str, once: str, more: set[int]) -> None:
    text = text_of(tokenizer, Grammar(grammar, begins_after=(BEGIN_ID,), repeats=True))
    for _ in range(3):
        assert next_ids(tokenizer, text) is None
        for token in (8, 9, BEGIN_ID, *tokenizer.tokenize_str(once, parse_special=True)):
            text.take(token)
            mask = next_ids(tokenizer, text)
        assert mask is None
        assert text.failure is None


def test_a_text_that_may_still_go_on_is_not_complete(tokenizer: LLTokenizer) -> None:
    text = text_of(tokenizer, Grammar(grammar_text.choice(["a", "ab"]), begins_after=(BEGIN_ID,), repeats=True))
    for token in (BEGIN_ID, *ids_of(tokenizer, "a")):
        text.take(token)
    assert next_ids(tokenizer, text) == {END_ID, *ids_of(tokenizer, "b")}


def test_many_texts_at_once_have_the_masks_that_each_has_alone(tokenizer: LLTokenizer) -> None:
    """Some sleep, some are behind by several tokens, one has strayed."""
    grammars = [
        Grammar(grammar_text.any_json_object()),
        Grammar(YES_NO, begins_after=(BEGIN_ID,)),
        Grammar(YES_NO, begins_after=(BEGIN_ID,), repeats=True),
        Grammar(grammar_text.regex("[a-c]+x")),
    ]
    begun: list[Sequence[int]] = [ids_of(tokenizer, '{"a'), [4, 4], [BEGIN_ID], ids_of(tokenizer, "abc")]
    more: list[Sequence[int]] = [
        ids_of(tokenizer, '":')[:1],
        [BEGIN_ID],
        ids_of(tokenizer, "no"),
        ids_of(tokenizer, "x"),
    ]
    texts = [text_of(tokenizer, grammar, ids) for grammar, ids in zip(grammars, begun, strict=True)]
    stray = text_of(tokenizer, grammars[3], ids_of(tokenizer, "ab"))
    maker = MaskMaker(tokenizer, 2, empty)
    maker.masks([*texts, stray])
    for text, ids in zip(texts, more, strict=True):
        for token in ids:
            text.take(token)
    stray.take(ids_of(tokenizer, "z")[0])
    held, words = maker.masks([*texts, stray])
    expected = [
        next_ids(tokenizer, text_of(tokenizer, grammar, [*ids, *rest]))
        for grammar, ids, rest in zip(grammars, begun, more, strict=True)
    ]
    got = {place: allowed(row) for place, row in zip(held, words, strict=True)}
    assert [got.get(place) for place in range(4)] == expected
    assert (stray.has_strayed, 4 in got) == (True, False)
    assert "doesn't satisfy the grammar" in (stray.failure or "")


def test_a_limit_is_no_straying(tokenizer: LLTokenizer) -> None:
    inner = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1100)}}
    schema = {"type": "object", "properties": {"k": inner}, "required": ["k"]}
    text = text_of(tokenizer, Grammar(grammar_text.json_schema(schema)), ids_of(tokenizer, '{"k":{'))
    assert next_ids(tokenizer, text) is None
    assert "max is 4000" in (text.failure or "")
    assert not text.has_strayed


def rows_of(tokenizer: LLTokenizer, *constrained: tuple[str, Grammar, tuple[int, ...]]) -> ConstrainedRows:
    """Of requests a, b, ...: id, grammar, output that the prompt ends with."""
    by_id: dict[str, Any] = {}
    grammars = Grammars(SimpleNamespace(), MaskMaker(tokenizer, 1, empty), tokenizer.vocab_size)  # type: ignore[arg-type]
    metrics = SimpleNamespace(masks_made=lambda count, duration_s: None)
    rows = ConstrainedRows(grammars, metrics, by_id)  # type: ignore[arg-type]
    for name, grammar, begun in constrained:
        texts = ChoiceTexts(grammar, compile_grammar(tokenizer, grammar.text, GrammarFuel()), begun)
        by_id[name] = SimpleNamespace(texts=texts)
        rows.follow(name)
    return rows


def test_rows_of_logits_have_the_masks_of_their_texts(tokenizer: LLTokenizer) -> None:
    """Rows, guessed ones, and a prompt's choices, among others that have no grammar. What is guessed wrongly counts for
    nothing behind it, and changes no text."""
    y, e = ids_of(tokenizer, "y")[0], ids_of(tokenizer, "e")[0]
    letters = Grammar(grammar_text.lark('start: "y" "e" "s"'))
    rows = rows_of(tokenizer, ("a", letters, ()), ("b", Grammar(YES_NO), ()), ("c", letters, (y,)))
    plan = StepPlan(
        3, (), (), (),
        (
            Slice("x", 0, 0, 5),
            Slice("a", 0, 1, 5, num_tokens=4, num_sampled=4, token_ids=(y, 7, 8)),
            Slice("c", 1, 2, 5),
            Slice.of_prompt("x", 3, 0, (1, 2), (SampleTarget(3, 0), SampleTarget(4, 1))),
            Slice.of_prompt("b", 5, 0, (9, 9), (SampleTarget(5, 0), SampleTarget(6, 1))),
        ),
    )  # fmt: skip
    assert rows.concern(plan)
    masks, strayed = rows.masks(plan)
    assert masks is not None
    assert strayed == ()
    assert masks.rows == (1, 2, 3, 4, 5, 8, 9)
    got = [allowed(words) for words in masks.words]
    behind_y = next_ids(tokenizer, text_of(tokenizer, letters, [y]))
    assert got[0] == next_ids(tokenizer, text_of(tokenizer, letters))
    assert got[1] == behind_y
    assert got[2] == got[3] == set(), "7 is none that may come behind y: nothing counts behind it"
    assert got[4] == behind_y
    assert got[5] == got[6] == next_ids(tokenizer, text_of(tokenizer, Grammar(YES_NO)))
    again, _ = rows.masks(plan)
    assert again is not None
    assert np.array_equal(again.words, masks.words)
    assert e in behind_y  # type: ignore[operator]
    assert not rows.concern(StepPlan(4, (), (), (), plan.slices[:1]))


def test_pieces_of_a_failed_step_have_their_own_masks(tokenizer: LLTokenizer) -> None:
    words = np.arange(4, dtype=np.int32)[:, None]
    seen: list[tuple[str, Any]] = []

    class Runner:
        def launch(self, plan: StepPlan) -> Any:
            seen.extend((part.request_id, None) for part in plan.slices)
            return SimpleNamespace(result=lambda: StepOutput(0, ()))

        def forward(self, plan: StepPlan) -> StepPlan:
            return plan

        def choose(self, plan: StepPlan, masks: TokenMasks) -> Any:
            seen.append((plan.slices[0].request_id, (masks.rows, masks.words[:, 0].tolist())))
            return SimpleNamespace(result=lambda: StepOutput(0, ()))

    slices = (
        Slice("a", 0, 0, 5),
        Slice("b", 0, 1, 5),
        Slice.of_prompt("c", 2, 0, (1, 2), (SampleTarget(2, 0), SampleTarget(3, 1))),
        Slice("d", 0, 4, 5),
    )
    run_isolated(Runner(), StepPlan(0, (), (), (), slices), TokenMasks((1, 2, 3, 4), words))  # type: ignore[arg-type]
    assert seen == [("a", None), ("b", ((0,), [0])), ("c", ((0, 1), [1, 2])), ("d", ((0,), [3]))]


@pytest.mark.parametrize(("last_ids", "is_held_back"), [((), True), ((40,), False)])
def test_min_tokens_yields_where_only_stops_may_come(last_ids: tuple[int, ...], is_held_back: bool) -> None:
    """40 is one that the client stops at, and nothing else is left by the grammar."""
    stops = frozenset({END_ID, *last_ids})
    bits = np.zeros((1, VOCAB_SIZE), dtype=np.uint8)
    bits[0, [END_ID, 40]] = 1
    masks = TokenMasks((0,), np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    rules = SlotRules(1, 32)
    rules.start(SlotInit(0, 0, SamplingParams(min_tokens=9), None, RuleContext((1, 2), 2, stops)))
    logits = torch.zeros(2, VOCAB_SIZE)
    changed = rules.apply(logits, [SamplePlace(0, 0, 4, 0), SamplePlace(0, 0, 4, 0)], masks)
    assert changed == [0, 1]
    finite = set(logits[0].isfinite().nonzero()[:, 0].tolist())
    assert finite == ({40} if is_held_back else {END_ID, 40})
    assert set(logits[1].isneginf().nonzero()[:, 0].tolist()) == stops, "without a mask it holds"


def test_choices_part_where_their_tokens_do(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(grammar_text.lark('start: "y" "e" "s" | "n" "o"'))
    texts = ChoiceTexts(grammar, compile_grammar(tokenizer, grammar.text, GrammarFuel()), ())
    y, n = (ids_of(tokenizer, letter)[0] for letter in "yn")
    texts.of(0).take(y)
    texts.of(1).take(n)
    assert next_ids(tokenizer, texts.of(0)) != next_ids(tokenizer, texts.of(1))
    assert next_ids(tokenizer, texts.of(2)) == next_ids(tokenizer, text_of(tokenizer, grammar))
    assert DONE_ID not in (next_ids(tokenizer, texts.of(0)) or ())


@pytest.mark.parametrize("num_threads", [1, 4])
def test_texts_of_twins_have_the_masks_of_one_grammar(tokenizer: LLTokenizer, num_threads: int) -> None:
    """Whichever twin each follows, in whatever order they are worked on; one strays, which tells on no other."""
    grammar = Grammar(grammar_text.any_json_object())
    compiled = compile_grammar(tokenizer, grammar.text, GrammarFuel())
    for _ in range(2):
        compiled.add_twin()
    twins = [FollowedText(grammar, compiled) for _ in range(30)]
    alone = [text_of(tokenizer, grammar) for _ in range(30)]
    assert [text.twin for text in twins[:6]] == [1, 2, 0, 1, 2, 0]
    maker, single = MaskMaker(tokenizer, num_threads, empty), MaskMaker(tokenizer, 1, empty)
    ids = [ids_of(tokenizer, '{"a":[1,{"b":"ab"}]}')[: 2 + number % 7] for number in range(30)]
    for step in range(7):
        for texts in (twins, alone):
            for number, text in enumerate(texts):
                if step < len(ids[number]):
                    text.take(ids[number][step])
        held, words = maker.masks(twins)
        expected_held, expected = single.masks(alone)
        assert held == expected_held == list(range(30))
        assert np.array_equal(words, expected)
    twins[4].take(ids_of(tokenizer, "z")[0])
    held, words = maker.masks(twins)
    assert held == [number for number in range(30) if number != 4]
    assert np.array_equal(words, np.delete(expected, 4, axis=0))
    assert twins[4].has_strayed


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_first_mask_that_is_known_is_the_one_that_would_be_made(tokenizer: LLTokenizer, num_threads: int) -> None:
    """Beside texts that are further on, at a beginning behind an opener, and of a copy."""
    source = grammar_text.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    opener = ids_of(tokenizer, "x")[0]
    known = compile_grammar(tokenizer, source, GrammarFuel())
    known.add_twin()
    unknown = CompiledGrammar(known.matcher, known.num_ends)
    assert known.first_words is not None
    masks = []
    for compiled in (known, unknown):
        texts = [FollowedText(Grammar(source), compiled, ids_of(tokenizer, '{"a"')[: place % 4]) for place in range(20)]
        texts += [FollowedText(Grammar(source, (opener,)), compiled, [opener]), texts[0].copy(), texts[1].copy()]
        held, words = MaskMaker(tokenizer, num_threads, empty).masks(texts)
        assert held == list(range(len(texts)))
        masks.append([allowed(row) for row in words])
    assert masks[0] == masks[1]
    assert masks[0][0] == masks[0][20] != masks[0][1]
