"""A grammar's text made ready to be followed, within limits; or refused, with the reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.joined_patterns import num_joined_patterns
from replicas.grammars.learned import Looks, most_bytes, most_steps, num_steps

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 500
# Begins a special token where llguidance writes one as bytes; nothing of any text.
_SPECIAL = b"\xff"
# How llguidance says that all texts of a lexer together have learned more states than may be kept.
TOO_MANY_STATES = "too many states"
# States that a lexer may have at first (schemas that people write have 50 to 250 after thousands of tokens), and so
# many times more whenever its texts need more.
_FIRST_STATES, _STATES_FACTOR = 500, 8
# Growth that is told of.
_TOLD_STEPS = 4_000


class GrammarRefused(Exception):
    """A text that is no grammar, has what is not supported, or takes more work than one request may cause. The message
    is the reason, fit for the client."""


@dataclass(slots=True, eq=False)
class Twin:
    """One lexer, and what has been learned there. matcher: at the beginning, where it stays. num_steps: that have been
    told of. num_worn: how often one in its place was worn out."""

    matcher: LLMatcher
    max_states: int
    num_steps: int
    num_worn: int = 0
    looks: Looks = field(init=False)

    def __post_init__(self) -> None:
        self.looks = Looks(self.num_steps)


class CompiledGrammar:
    """Any thread.

    Copies of one matcher wait for each other, whichever thread each is used on: llguidance keeps what it learns of a
    grammar's words once for all of them, behind a lock. So a grammar that many texts follow has twins, compiled from
    the same text, and each text follows one of them: texts of different twins go on at the same time.

    What is learned is kept for as long as the twin is. At first there is room for what most grammars ever need; a twin
    whose texts need more is compiled anew with more room, and its texts go on there, up to
    `GrammarFuel.max_lexer_states`. Where all its texts together reach that, none can go on: it is worn out, and a new
    one takes its place; the texts go on with what they have for themselves, and end only where they reach the limit
    there.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_ends: int,
        compile_twin: Callable[[int], LLMatcher] | None = None,
        first_words: NDArray[np.int32] | None = None,
        *,
        num_chars: int = 0,
        max_states: int = 0,
        most_states: int = 0,
        compiled_steps: int = 0,
    ) -> None:
        """matcher: at the beginning, where it stays: `start` copies it. num_ends: tokens that end an answer.
        compile_twin: with room for so many states; milliseconds, lets other threads run; None: it has none.
        first_words: the mask of every text's first token, where it is known. num_chars: of its text. max_states: that
        the matcher has room for; most_states: that there may be room for. compiled_steps: spent so far."""
        self.tell_worn_out: Callable[[], None] = lambda: None  # called for each twin that is
        self.tell_grown: Callable[[CompiledGrammar], None] = lambda grown: None  # called with it, when it takes more
        self.first_words = first_words
        self.num_ends = num_ends
        self._compile_twin = compile_twin
        self._num_chars, self._max_states, self._most_states = num_chars, max_states, most_states
        self.compiled_steps = compiled_steps
        self._twins = [Twin(matcher, max_states, compiled_steps)]
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

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, at most, as far as it is known what its texts have learned."""
        return sum(most_bytes(self._num_chars, twin.num_steps, twin.max_states) for twin in self._twins)

    @property
    def most_steps(self) -> int:
        """That one lexer may spend before it is worn out: those of its states alone may be few."""
        return self.compiled_steps + most_steps(self._most_states)

    def add_twin(self) -> None:
        """Blocks for milliseconds. Mutates. Does nothing where it can't have any."""
        if self._compile_twin is None:
            return
        matcher = self._compile_twin(self._max_states)
        if not matcher.is_error():
            with self._lock:
                self._twins.append(Twin(matcher, self._max_states, self.compiled_steps))

    def choose_twin(self) -> int:
        """Of a text that begins: they take turns. Mutates."""
        with self._lock:
            self._num_begun += 1
            return self._num_begun % len(self._twins)

    def twin(self, index: int) -> Twin:
        """Of which a text is to copy the matcher: some microseconds."""
        return self._twins[index]

    def start(self, index: int = 0) -> LLMatcher:
        """What follows one text from its beginning. Some microseconds."""
        return self._twins[index].matcher.deep_copy()

    def learned(self, twin: Twin, num_steps: int) -> None:
        """So many steps are spent there by now. Mutates."""
        if num_steps - twin.num_steps >= _TOLD_STEPS:
            twin.num_steps = num_steps
            self.tell_grown(self)

    def instead(self, index: int, full: Twin | None) -> tuple[LLMatcher, Twin | None] | None:
        """What follows one text from its beginning, and the twin that it is a copy of, or None if it shares nothing
        with others: since there is no more room in the twin that it was a copy of, or where it was alone (None). Blocks
        for milliseconds, twice as long for the first of a twin's texts. Mutates. None where it can't be had."""
        if self._compile_twin is None:
            return None
        if full is not None:
            self._replace(index, full)
            if full.max_states < self._most_states:
                twin = self._twins[index]
                return twin.matcher.deep_copy(), twin
        alone = self._compile_twin(self._most_states)
        return None if alone.is_error() else (alone, None)

    def _replace(self, index: int, full: Twin) -> None:
        """Once for each twin; texts of two threads that get there at the same time both compile one. A twin that was
        there before its matcher would be taken for another full one, and be replaced in turn."""
        assert self._compile_twin is not None
        if self._twins[index] is not full:
            return
        is_worn = full.max_states >= self._most_states
        max_states = _more_states(full.max_states, self._most_states)
        fresh = self._compile_twin(max_states)
        matcher = full.matcher if fresh.is_error() else fresh
        twin = Twin(matcher, max_states, self.compiled_steps, full.num_worn + is_worn)
        with self._lock:
            if self._twins[index] is not full:
                return
            self._twins[index] = twin
        if is_worn:
            self.tell_worn_out()
            extra = {"event": "grammar_worn_out", "times": twin.num_worn}
            logger.info("a grammar is compiled anew: its texts have reached max_lexer_states", extra=extra)
        self.tell_grown(self)


def compile_grammar(tokenizer: LLTokenizer, text: str, fuel: GrammarFuel) -> CompiledGrammar:
    """Milliseconds; lets other threads run. Raises GrammarRefused."""
    num_joined = num_joined_patterns(text)
    if num_joined > fuel.max_joined_patterns:
        most = fuel.max_joined_patterns
        raise GrammarRefused(f"one string would have to match {num_joined} regular expressions: at most {most} may be")
    max_states = min(_FIRST_STATES, fuel.max_lexer_states)
    while True:
        try:
            return _compiled(tokenizer, text, fuel, max_states)
        except GrammarRefused as refused:
            if TOO_MANY_STATES not in str(refused) or max_states >= fuel.max_lexer_states:
                raise
        max_states = _more_states(max_states, fuel.max_lexer_states)


def _more_states(max_states: int, most_states: int) -> int:
    """The next room: half of all that there may be is as good as all."""
    more = _STATES_FACTOR * max_states
    return more if 2 * more <= most_states else most_states


def _compiled(tokenizer: LLTokenizer, text: str, fuel: GrammarFuel, max_states: int) -> CompiledGrammar:
    """The first mask is made too, and the one behind what must come first: some grammars are built within their limits,
    and exceed them as soon as they are used."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=fuel.limits(max_states))
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
    return CompiledGrammar(
        matcher,
        len(tokenizer.eos_tokens),
        lambda max_states: _compiled_again(tokenizer, text, fuel, max_states),
        first_words,
        num_chars=len(text),
        max_states=max_states,
        most_states=fuel.max_lexer_states,
        compiled_steps=num_steps(tried),
    )


def _compiled_again(tokenizer: LLTokenizer, text: str, fuel: GrammarFuel, max_states: int) -> LLMatcher:
    """As `compile_grammar` has compiled it before."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=fuel.limits(max_states))
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
