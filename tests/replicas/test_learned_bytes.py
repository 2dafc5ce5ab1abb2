"""Memory of compiled grammars: it counts as what it takes, which grows while texts are held against them."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from llguidance import LLTokenizer

from replicas.grammars import grammar_text
from replicas.grammars.choice_texts import ChoiceTexts
from replicas.grammars.compiled_grammar import CompiledGrammar, compile_grammar
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.learned import num_steps
from replicas.grammars.mask_maker import MaskMaker
from scheduler.grammar import Grammar
from tests.model_folder import model_folder

PATIENCE_S = 120.0
MB = 1_000_000
# Each place of a text is one of 2^24 that the expression tells apart.
GREEDY = grammar_text.regex("[a-z ]*a[a-z ]{24}q[a-z ]*")
# Each is one of so many remainders: few states, but expensive ones.
MULTIPLE = grammar_text.json_schema({"type": "integer", "multipleOf": 1_000_000_000})


def product(words: str) -> str:
    """How often each letter has come, modulo three, all at once: states that cost no steps."""
    rules = "\n".join(f"T{one.upper()}: /(([^{one}]*{one}){{3}})*[^{one}]*{one}/" for one in words)
    return grammar_text.lark("start: " + " | ".join(f"T{one.upper()}" for one in words) + "\n" + rules)


SCHEMA = grammar_text.json_schema(
    {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(40)}}
)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return grammar_tokenizer(model_folder(), 49_152, (0, 2))


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Of this process, that are in use. Skips where the C library does not say."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("no mallinfo2: not glibc, or an old one")
    library.mallinfo2.restype = _Mallinfo2
    gc.collect()
    told = library.mallinfo2()
    return int(told.uordblks + told.hblkhd)


def cache_of(tokenizer: LLTokenizer, max_bytes: int) -> GrammarCache:
    return GrammarCache(tokenizer, GrammarFuel(), num_threads=1, max_entries=1_000, max_bytes=max_bytes)


def write(tokenizer: LLTokenizer, texts: Sequence[FollowedText], num_tokens: int, seed: int = 0) -> list[list[int]]:
    """What they go on with, by chance, but with no end where there is something else."""
    maker = MaskMaker(tokenizer, 1, lambda rows, words: np.empty((rows, words), dtype=np.int32))
    rngs = [random.Random(1_000 * seed + place) for place in range(len(texts))]
    written: list[list[int]] = [[] for _ in texts]
    for _ in range(num_tokens):
        held, words = maker.masks(texts)
        for place, row in zip(held, words, strict=True):
            ids = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
            if more := [token_id for token_id in ids if token_id not in (0, 2)]:
                written[place].append(rngs[place].choice(more))
                texts[place].take(written[place][-1])
    return written


def begin(cache: GrammarCache, text: str) -> tuple[CompiledGrammar, FollowedText]:
    compiled = cache.get(text).result(PATIENCE_S)
    return compiled, FollowedText(Grammar(text), compiled)


def test_steps_that_a_lexer_has_spent_are_known_of_every_copy(tokenizer: LLTokenizer) -> None:
    compiled = compile_grammar(tokenizer, GREEDY, GrammarFuel())
    assert 1_000 < compiled.compiled_steps < 20_000
    one, other = (FollowedText(Grammar(GREEDY), compiled) for _ in range(2))
    write(tokenizer, [one], 30)
    assert one.matcher is not None
    assert num_steps(one.matcher) > 2 * compiled.compiled_steps
    write(tokenizer, [other], 3, seed=1)
    assert other.matcher is not None
    assert num_steps(other.matcher) >= num_steps(one.matcher), "it knows of the first one's too"


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [(SCHEMA, 60), (GREEDY, 200), (MULTIPLE, 60), (product("abcdefghij"), 30), (product("abcdef"), 60)],
    ids=["schema", "greedy", "multiple", "products", "fewer products"],
)
def test_what_is_kept_counts_at_least_as_much_as_it_takes(tokenizer: LLTokenizer, text: str, num_tokens: int) -> None:
    warm = cache_of(tokenizer, 10_000 * MB)
    write(tokenizer, [begin(warm, grammar_text.any_json_object())[1]], 20)
    cache = cache_of(tokenizer, 10_000 * MB)
    before = heap_bytes()
    compiled, followed = begin(cache, text)
    at_first = cache.num_bytes
    write(tokenizer, [followed, FollowedText(Grammar(text), compiled)], num_tokens)
    assert followed.failure is None
    del followed
    took = heap_bytes() - before
    print(f"took {took / MB:.2f} MB, counted {at_first / MB:.2f} MB at first, {cache.num_bytes / MB:.2f} MB now")
    unseen = 1.5 * MB  # what has been learned since a text last looked
    assert 0.05 * MB < took < cache.num_bytes + unseen
    assert cache.num_bytes < 70 * MB, "one never counts as more"


def test_texts_that_learn_push_out_others_and_go_on(tokenizer: LLTokenizer) -> None:
    """Also the one that they belong to, where others were asked for after it."""
    cache = cache_of(tokenizer, 4 * MB)
    compiled, text = begin(cache, MULTIPLE)
    other = cache.get(SCHEMA)
    assert other.result(PATIENCE_S)
    assert cache.get(MULTIPLE).result(PATIENCE_S) is compiled
    written = write(tokenizer, [text], 80)[0]
    assert cache.num_bytes < 4 * MB or cache.get(MULTIPLE).result(PATIENCE_S) is compiled, "but for the newest"
    misses = cache.counts.misses
    assert cache.get(SCHEMA) is not other
    assert cache.counts.misses == misses + 1
    assert (text.failure, len(written)) == (None, 80)
    fresh = FollowedText(Grammar(MULTIPLE), compile_grammar(tokenizer, MULTIPLE, GrammarFuel()))
    assert write(tokenizer, [fresh], 80)[0] == written


def test_hostile_grammars_take_no_more_than_the_bound(tokenizer: LLTokenizer) -> None:
    """Each by itself is within its limits. Together they would take some 40 MB."""
    bound = 16 * MB
    cache = cache_of(tokenizer, bound)
    texts = [MULTIPLE.replace('"integer"', f'"integer", "title": "{place}"') for place in range(6)]
    begun = heap_bytes()
    for text in texts:
        write(tokenizer, [begin(cache, text)[1]], 30)
        assert cache.num_bytes < bound
        assert heap_bytes() - begun < bound + 3 * MB


def test_what_is_forgotten_is_freed_at_once(tokenizer: LLTokenizer) -> None:
    """No circle of references keeps it until somebody looks for circles."""
    cache = GrammarCache(tokenizer, GrammarFuel(), num_threads=1, max_entries=1, max_bytes=1_000 * MB)
    write(tokenizer, [begin(cache, MULTIPLE)[1]], 80)
    before = heap_bytes()
    gc.disable()
    try:
        assert cache.get("start: foo").exception(60)
        cache._threads.shutdown(wait=True)
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Mallinfo2
        told = library.mallinfo2()
        assert before - (told.uordblks + told.hblkhd) > 2 * MB
    finally:
        gc.enable()


def test_no_text_keeps_more_than_its_bound_and_goes_on_as_if_there_were_none(tokenizer: LLTokenizer) -> None:
    """What it has learned is let go of when it is too much, as often as that happens."""
    text, fuel = MULTIPLE, GrammarFuel(max_lexer_states=3_000)
    compiled = compile_grammar(tokenizer, text, fuel)
    assert compiled._compile_twin is not None
    compile_twin, compiles = compiled._compile_twin, []

    def counting(max_states: int, compile_one: Callable[[int], object]) -> object:
        compiles.append(max_states)
        return compile_one(max_states)

    compiled._compile_twin = partial(counting, compile_one=compile_twin)  # type: ignore[assignment]
    followed = FollowedText(Grammar(text), compiled)
    written = write(tokenizer, [followed], 60)[0]
    assert (followed.failure, len(written)) == (None, 60)
    assert len(compiles) >= 2
    assert set(compiles) == {3_000}
    assert followed.matcher is not None
    assert num_steps(followed.matcher) < compiled.most_steps + 300_000
    free = FollowedText(Grammar(text), compile_grammar(tokenizer, text, GrammarFuel()))
    assert write(tokenizer, [free], 60)[0] == written


def test_a_grammar_that_needs_more_states_than_most_gets_them_once_for_all_its_texts(tokenizer: LLTokenizer) -> None:
    compiled = compile_grammar(tokenizer, GREEDY, GrammarFuel())
    texts = ChoiceTexts(Grammar(GREEDY), compiled, ())
    both = [texts.of(0), texts.of(1)]
    counted = compiled.num_bytes
    written = write(tokenizer, both, 40)
    assert [text.failure for text in both] == [None, None]
    assert [twin.num_worn for twin in compiled._twins] == [0]
    assert compiled.num_bytes - counted > 2 * MB
    assert len({id(text._twin) for text in both}) == 1, "both share what it learns"
    later = FollowedText(Grammar(GREEDY), compiled, written[0])
    assert write(tokenizer, [later], 5, seed=3) == write(tokenizer, [both[0]], 5, seed=3)


def test_what_needs_more_states_from_the_beginning_has_room_for_them(tokenizer: LLTokenizer) -> None:
    text = product("abcdefghijkl")
    compiled = compile_grammar(tokenizer, text, GrammarFuel())
    assert compiled.num_bytes > 30 * MB
    assert json.loads(text)["grammars"]
