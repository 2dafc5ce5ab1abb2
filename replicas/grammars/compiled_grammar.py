"""A grammar's text made ready to be followed, within limits; or refused, with the reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.joined_patterns import num_joined_patterns

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 500
# Begins a special token where llguidance writes one as bytes; nothing of any text.
_SPECIAL = b"\xff"


class GrammarRefused(Exception):
    """A text that is no grammar, has what is not supported, or takes more work than one request may cause. The message
    is the reason, fit for the client."""


class CompiledGrammar:
    """Any thread.

    Copies of one matcher wait for each other, whichever thread each is used on: llguidance keeps what it learns of a
    grammar's words once for all of them, behind a lock. So a grammar that many texts follow has twins, compiled from
    the same text, and each text follows one of them: texts of different twins go on at the same time.

    What is learned is limited (`GrammarFuel.max_lexer_states`), and kept for as long as the twin is: where all its
    texts together reach the limit, none can go on. Then it is worn out, and a new one takes its place; the texts go on
    with what they have for themselves (`start_alone`), and end only where they reach the limit there.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_ends: int,
        compile_twin: Callable[[], LLMatcher] | None = None,
        first_words: NDArray[np.int32] | None = None,
    ) -> None:
        """matcher: at the beginning, where it stays: `start` copies it. num_ends: tokens that end an answer.
        compile_twin: milliseconds, lets other threads run; None: it has none. first_words: the mask of every text's
        first token, where it is known."""
        self.tell_worn_out: Callable[[], None] = lambda: None  # called for each twin that is
        self.first_words = first_words
        self.num_ends = num_ends
        self._compile_twin = compile_twin
        self._twins = [_Twin(matcher)]
        self._num_begun = 0  # texts
        self._lock = threading.Lock()

    @property
    def matcher(self) -> LLMatcher:
        """At the beginning, where it is to stay."""
        return self._twins[0].matcher

    @property
    def num_twins(self) -> int:
        """Itself counted."""
        return len(self._twins)

    def add_twin(self) -> None:
        """Blocks for milliseconds. Mutates. Does nothing where it can't have any."""
        if self._compile_twin is None:
            return
        twin = self._compile_twin()
        if not twin.is_error():
            with self._lock:
                self._twins.append(_Twin(twin))

    def choose_twin(self) -> int:
        """Of a text that begins: they take turns. Mutates."""
        with self._lock:
            self._num_begun += 1
            return self._num_begun % len(self._twins)

    def start(self, twin: int = 0) -> LLMatcher:
        """What follows one text from its beginning. Some microseconds."""
        return self._twins[twin].matcher.deep_copy()

    def num_worn(self, twin: int) -> int:
        """How often it has been worn out."""
        return self._twins[twin].num_worn

    def start_alone(self, twin: int, num_worn: int) -> LLMatcher | None:
        """What follows one text from its beginning, and shares nothing with others, since the twin is worn out that it
        began with when `num_worn` was that. Blocks for milliseconds, twice as long for the first of its texts. Mutates.
        None where it can't be had."""
        if self._compile_twin is None:
            return None
        with self._lock:
            worn = self._twins[twin]
            is_first = worn.num_worn == num_worn
            if is_first:
                self._twins[twin] = _Twin(worn.matcher, num_worn + 1)
        if is_first:
            self.tell_worn_out()
            extra = {"event": "grammar_worn_out", "times": num_worn + 1}
            logger.info("a grammar is compiled anew: its texts have reached max_lexer_states", extra=extra)
            if not (fresh := self._compile_twin()).is_error():
                self._twins[twin].matcher = fresh
        alone = self._compile_twin()
        return None if alone.is_error() else alone


@dataclass(slots=True)
class _Twin:
    matcher: LLMatcher  # at the beginning
    num_worn: int = 0


def compile_grammar(tokenizer: LLTokenizer, text: str, fuel: GrammarFuel) -> CompiledGrammar:
    """Milliseconds; lets other threads run. Raises GrammarRefused.

    The first mask is made too, and the one behind what must come first: some grammars are built within their limits,
    and exceed them as soon as they are used.
    """
    num_joined = num_joined_patterns(text)
    if num_joined > fuel.max_joined_patterns:
        most = fuel.max_joined_patterns
        raise GrammarRefused(f"one string would have to match {num_joined} regular expressions: at most {most} may be")
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=fuel.limits())
    _refuse_failed(matcher)
    first_words = np.empty(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(first_words.ctypes.data, first_words.nbytes)
    _refuse_failed(matcher)
    tried = matcher.deep_copy()
    if must_come := tried.compute_ff_bytes().partition(_SPECIAL)[0]:
        tried.consume_tokens(tokenizer.tokenize_bytes(must_come))
        if not tried.is_stopped():
            tried.compute_bitmask()
    _refuse_failed(tried)
    num_ends = len(tokenizer.eos_tokens)
    return CompiledGrammar(matcher, num_ends, lambda: _compiled_again(tokenizer, text, fuel), first_words)


def _compiled_again(tokenizer: LLTokenizer, text: str, fuel: GrammarFuel) -> LLMatcher:
    """As `compile_grammar` has compiled it before."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=fuel.limits())
    matcher.compute_bitmask()
    return matcher


def _refuse_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarRefused(reason_of(matcher))


def reason_of(matcher: LLMatcher) -> str:
    """Why it has failed, in one line or few."""
    text = matcher.get_error().partition("\n<")[0].strip() or "it takes too much work"
    if text.startswith("oneOf constraints are not supported"):  # as llguidance says it: with an option of its own
        text = "oneOf is supported only where its alternatives are known to exclude each other; use anyOf"
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]} ..."
