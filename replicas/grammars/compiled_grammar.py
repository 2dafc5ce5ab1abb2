"""A grammar's text made ready to be followed, within limits; or refused, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.joined_patterns import num_joined_patterns

_MAX_REASON_CHARS = 500
# Begins a special token where llguidance writes one as bytes; nothing of any text.
_SPECIAL = b"\xff"


class GrammarRefused(Exception):
    """A text that is no grammar, has what is not supported, or takes more work than one request may cause. The message
    is the reason, fit for the client."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """matcher: at the beginning, and it stays there: `start` copies it. num_ends: tokens that end an answer."""

    matcher: LLMatcher
    num_ends: int

    def start(self) -> LLMatcher:
        """What follows one text from its beginning. Some microseconds. Any thread."""
        return self.matcher.deep_copy()


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
    matcher.compute_bitmask()
    _refuse_failed(matcher)
    tried = matcher.deep_copy()
    if must_come := tried.compute_ff_bytes().partition(_SPECIAL)[0]:
        tried.consume_tokens(tokenizer.tokenize_bytes(must_come))
        if not tried.is_stopped():
            tried.compute_bitmask()
    _refuse_failed(tried)
    return CompiledGrammar(matcher, len(tokenizer.eos_tokens))


def _refuse_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarRefused(reason_of(matcher))


def reason_of(matcher: LLMatcher) -> str:
    """Why it has failed, in one line or few."""
    text = matcher.get_error().partition("\n<")[0].strip() or "it takes too much work"
    if text.startswith("oneOf constraints are not supported"):  # as llguidance says it: with an option of its own
        text = "oneOf is supported only where its alternatives are known to exclude each other; use anyOf"
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]} ..."
