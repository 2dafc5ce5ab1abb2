"""Texts of one grammar share what is learned of its words, which is limited: what one text learns ends no other."""

from __future__ import annotations

import logging
import random
import threading

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from replicas.grammars import grammar_text
from replicas.grammars.compiled_grammar import CompiledGrammar, compile_grammar
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.mask_maker import MaskMaker
from scheduler.grammar import Grammar
from tests.model_folder import model_folder

FUEL = GrammarFuel(max_lexer_states=20_000)
# Each place of a text is one of 2^30 that the expression tells apart.
GREEDY_FOR_STATES = Grammar(grammar_text.regex("[a-z ]*a[a-z ]{30}q[a-z ]*"))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return grammar_tokenizer(model_folder(), 49_152, (0, 2))


def maker_of(tokenizer: LLTokenizer, num_threads: int) -> MaskMaker:
    return MaskMaker(tokenizer, num_threads, lambda rows, words: np.empty((rows, words), dtype=np.int32))


def compiled_of(tokenizer: LLTokenizer) -> CompiledGrammar:
    return compile_grammar(tokenizer, GREEDY_FOR_STATES.text, FUEL)


def ids_of(words: np.ndarray) -> list[int]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()  # type: ignore[no-any-return]


def write(maker: MaskMaker, texts: list[FollowedText], seed: int, num_tokens: int) -> list[list[int]]:
    """What each of the texts goes on with, chosen by its seed and its place: until it fails."""
    rngs = [random.Random(100 * seed + place) for place in range(len(texts))]
    written: list[list[int]] = [[] for _ in texts]
    for _ in range(num_tokens):
        held, words = maker.masks(texts)
        for place, row in zip(held, words, strict=True):
            token_id = rngs[place].choice(ids_of(row))
            texts[place].take(token_id)
            written[place].append(token_id)
    return written


def wear_out(maker: MaskMaker, compiled: CompiledGrammar) -> None:
    """Until its own limit ends a text of it."""
    text = FollowedText(GREEDY_FOR_STATES, compiled)
    write(maker, [text], 1, 1_000)
    assert text.failure is not None
    assert "too many states" in text.failure
    assert not text.has_strayed


def test_a_text_that_takes_too_much_ends_none_that_begins_later(
    tokenizer: LLTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    maker, compiled = maker_of(tokenizer, 1), compiled_of(tokenizer)
    with caplog.at_level(logging.INFO):
        wear_out(maker, compiled)
    assert [record.event for record in caplog.records if hasattr(record, "event")].count("grammar_worn_out") == 1
    for seed in range(3):
        fresh, later = (
            FollowedText(GREEDY_FOR_STATES, compiled_of(tokenizer)),
            FollowedText(GREEDY_FOR_STATES, compiled),
        )
        assert write(maker, [fresh], seed, 30) == write(maker, [later], seed, 30)
        assert later.failure is None


@pytest.mark.parametrize("num_threads", [1, 2])
def test_texts_at_the_same_time_go_on_as_if_each_were_alone(tokenizer: LLTokenizer, num_threads: int) -> None:
    """Together they learn more than may be kept, each by itself does not. By tokens one by one and side by side."""
    maker, compiled = maker_of(tokenizer, num_threads), compiled_of(tokenizer)
    compiled.add_twin()
    together = [FollowedText(GREEDY_FOR_STATES, compiled) for _ in range(10)]
    written = write(maker, together, 7, 30)
    assert [text.failure for text in together] == [None] * 10
    assert {len(ids) for ids in written} == {30}
    assert len(compiled_wear(compiled)) == 2
    assert max(compiled_wear(compiled)) > 0, "none was worn out"
    alone = [FollowedText(GREEDY_FOR_STATES, compiled_of(tokenizer)) for _ in range(10)]
    assert write(maker, alone, 7, 30) == written


def compiled_wear(compiled: CompiledGrammar) -> list[int]:
    """How often each twin was worn out."""
    return [twin.num_worn for twin in compiled._twins]


def test_copies_and_what_comes_behind_an_opener_go_on_too(tokenizer: LLTokenizer) -> None:
    maker, compiled = maker_of(tokenizer, 1), compiled_of(tokenizer)
    opener = tokenizer.tokenize_str("{")[0]
    behind = FollowedText(Grammar(GREEDY_FOR_STATES.text, (opener,)), compiled)
    first = FollowedText(GREEDY_FOR_STATES, compiled)
    before = write(maker, [first], 3, 5)[0]
    wear_out(maker, compiled)
    behind.take(opener)
    copied = first.copy()
    expected = FollowedText(GREEDY_FOR_STATES, compiled_of(tokenizer), before)
    anew = FollowedText(GREEDY_FOR_STATES, compiled_of(tokenizer))
    assert write(maker, [expected], 4, 10) == write(maker, [copied], 4, 10) == write(maker, [first], 4, 10)
    assert write(maker, [behind], 5, 10) == write(maker, [anew], 5, 10)


def test_the_cache_counts_it(tokenizer: LLTokenizer) -> None:
    cache = GrammarCache(tokenizer, FUEL, num_threads=1, max_entries=3, max_bytes=1 << 26)
    wear_out(maker_of(tokenizer, 1), cache.get(GREEDY_FOR_STATES.text).result(120))
    assert cache.counts.worn_out == 1
    cache.close()


def test_texts_of_two_threads_that_find_a_twin_full_replace_it_once(tokenizer: LLTokenizer) -> None:
    """A replay's, on a thread of the cache, and one that the engine's thread holds: the second comes while the first
    one's twin is compiled, and has room in a new one, too. Else it would take that for full, and ask for more and more
    until the grammar is worn out."""
    compiled = compiled_of(tokenizer)
    compile_twin, rooms = compiled._compile_twin, []
    assert compile_twin is not None
    is_compiling, goes_on = threading.Event(), threading.Event()

    def slow_at_first(max_states: int) -> LLMatcher:
        rooms.append(max_states)
        if len(rooms) == 1:
            is_compiling.set()
            assert goes_on.wait(60)
        return compile_twin(max_states)

    compiled._compile_twin = slow_at_first
    full = compiled.twin(0)
    first = threading.Thread(target=compiled.instead, args=(0, full))
    first.start()
    assert is_compiling.wait(60)
    anew = compiled.instead(0, full)
    assert anew is not None
    _, twin = anew
    assert twin is not None
    has_own_matcher = twin.matcher is not full.matcher
    goes_on.set()
    first.join(60)
    assert has_own_matcher, "what it gave was a copy of what is full"
    assert compiled.twin(0) is twin, "the first one's comes too late"
    assert set(rooms) == {twin.max_states}, "no more room than the next"
    assert compiled_wear(compiled) == [0]


def test_what_is_not_allowed_is_no_wear(tokenizer: LLTokenizer) -> None:
    compiled = compiled_of(tokenizer)
    text = FollowedText(GREEDY_FOR_STATES, compiled, tokenizer.tokenize_str("A"))
    text.catch_up()
    assert text.has_strayed
    assert compiled_wear(compiled) == [0]


def test_a_grammar_that_cannot_be_compiled_anew_ends_the_text_and_is_tried_again_for_the_next(
    tokenizer: LLTokenizer,
) -> None:
    """Where memory was short for a moment, or the fuel ran out."""
    maker, compiled = maker_of(tokenizer, 1), compiled_of(tokenizer)
    compile_twin, tries = compiled._compile_twin, []
    assert compile_twin is not None

    def failing(max_states: int) -> LLMatcher:
        tries.append(1)
        return LLMatcher(tokenizer, "no grammar", log_level=0)

    compiled._compile_twin = failing
    wear_out(maker, compiled)
    assert len(tries) == 4, "with more room twice, once more for all texts, and for this one"
    compiled._compile_twin = compile_twin
    fresh, later = FollowedText(GREEDY_FOR_STATES, compiled_of(tokenizer)), FollowedText(GREEDY_FOR_STATES, compiled)
    assert write(maker, [fresh], 2, 30) == write(maker, [later], 2, 30)
    assert later.failure is None
    assert compiled_wear(compiled) == [2]
