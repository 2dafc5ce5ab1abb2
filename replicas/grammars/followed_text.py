"""One text on its way, held against its grammar: a function of the grammar and of the tokens so far, nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from replicas.grammars.compiled_grammar import TOO_MANY_STATES, CompiledGrammar, Twin, reason_of
from replicas.grammars.learned import Looks, num_steps
from scheduler.grammar import Grammar

# How llguidance says that a token was none that the mask allowed. All its other errors are limits.
_NOT_ALLOWED = "doesn't satisfy the grammar"


class FollowedText:
    """One thread at a time. Raises nothing: what fails says so in `failure`, for good.

    `take` costs nothing; the work is done by `catch_up`, or for many texts at once by a `MaskMaker`.
    """

    __slots__ = (
        "_compiled",
        "_grammar",
        "_looks",
        "_matcher",
        "_path",
        "_twin",
        "failure",
        "has_strayed",
        "is_held",
        "pending",
        "twin",
    )

    def __init__(self, grammar: Grammar, compiled: CompiledGrammar, token_ids: Iterable[int] = ()) -> None:
        """token_ids: what the output begins with."""
        self._grammar, self._compiled = grammar, compiled
        self.twin = compiled.choose_twin()
        self._twin: Twin | None = None  # that its matcher is a copy of; None with a matcher: it shares nothing
        self._looks = Looks(compiled.compiled_steps)  # while it shares nothing
        self._path: list[int] = []  # what its matcher has consumed
        self._matcher: LLMatcher | None = None
        self.is_held = not grammar.begins_after  # else any token may come
        self.pending: list[int] = list(token_ids)
        self.failure: str | None = None
        self.has_strayed = False  # failed by a token that it did not allow: a bug of ours

    def copy(self) -> FollowedText:
        """As it is now; from then on they are apart."""
        other = FollowedText.__new__(FollowedText)
        other._grammar, other._compiled, other.twin = self._grammar, self._compiled, self.twin
        other._twin, other._path = self._twin, list(self._path)
        other._looks = self._looks
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        other.is_held = self.is_held
        other.pending = list(self.pending)
        other.failure, other.has_strayed = self.failure, self.has_strayed
        return other

    @property
    def matcher(self) -> LLMatcher | None:
        """At the place that the tokens lead to, but for those in pending; None while any token may come. Copied from
        its twin when it is asked for first: a first token needs none."""
        if self._matcher is None and self.is_held:
            self._twin = self._compiled.twin(self.twin)
            self._matcher = self._twin.matcher.deep_copy()
        return self._matcher

    @property
    def waits_with(self) -> tuple[int, int]:
        """What is equal of texts that can't be worked on at the same time: whose matchers have a lock in common."""
        is_alone = self._matcher is not None and self._twin is None
        return (-1, id(self)) if is_alone else (self.twin, id(self._compiled))

    @property
    def known_words(self) -> NDArray[np.int32] | None:
        """Its mask, after `catch_up`, where that needs no work: of the first token, which is that of all its texts."""
        return self._compiled.first_words if self.is_held and not self._path else None

    def take(self, token_id: int) -> None:
        """The next token of the output. Mutates."""
        self.pending.append(token_id)

    def catch_up(self) -> None:
        """Go by the tokens that were taken. Mutates. Some 20 microseconds each where the grammar holds."""
        for token_id in self.pending:
            if self.matcher is None:
                if token_id in self._grammar.begins_after:
                    self.is_held, self._twin, self._path = True, None, []
            else:
                self.matcher.consume_token(token_id)
                self.consumed(token_id)
        self.pending.clear()

    def forced(self, most: int) -> tuple[int, ...]:
        """The next tokens, at most so many, where the grammar leaves nothing else to write; after `catch_up`.

        As the tokenizer would write that text: a model may cut the same bytes into other tokens, which a mask allows as
        well. So these are guesses. 5 to 60 microseconds; of a long forced text as long as for a mask.
        """
        if self.matcher is None or self.failure is not None:
            return ()
        # A copy: what fails here is no failure of the text.
        return tuple(self.matcher.deep_copy().compute_ff_tokens()[:most])

    def consumed(self, token_id: int) -> None:
        """Its matcher has consumed the token. Mutates."""
        assert self.matcher is not None
        self._path.append(token_id)
        self.check()
        looks = self._looks if self._twin is None else self._twin.looks
        if self.failure is None and looks.is_due():
            self._look(looks)
        if self._grammar.repeats and self.failure is None and self._is_complete():
            self.is_held, self._matcher = False, None

    def check(self) -> bool:
        """Note whether its matcher has failed. Mutates. True where it failed by what others have done, and has another
        matcher now, at the same place: what the first was asked is to be asked again. Blocks for milliseconds then."""
        if self.failure is not None or self._matcher is None or not self._matcher.is_error():
            return False
        reason = reason_of(self._matcher)
        if TOO_MANY_STATES in reason and self._twin is not None and self._go_on_anew():
            return True
        self.failure = reason_of(self._matcher) if self._matcher.is_error() else reason
        self.has_strayed = _NOT_ALLOWED in self.failure
        return False

    def _look(self, looks: Looks) -> None:
        """Tell how much its lexer has learned, and leave it where that is too much. Mutates. 50 to 250 microseconds."""
        assert self._matcher is not None
        now = num_steps(self._matcher)
        if self._twin is not None:
            self._compiled.learned(self._twin, now)
        looks.looked(now)
        if now > self._compiled.most_steps and self._go_on_anew():
            looks.again()

    def _go_on_anew(self) -> bool:
        """By the same tokens, with a matcher that has room to learn: one shared with others, or its own. Whether it got
        there; else it is as it was, or has failed again."""
        twin = self._twin
        while (anew := self._compiled.instead(self.twin, twin)) is not None:
            matcher, twin = anew
            if matcher.consume_tokens(self._path) and not matcher.is_error():
                self._matcher, self._twin, self._looks = matcher, twin, Looks(self._compiled.compiled_steps)
                return True
            if twin is None:
                break
        return False

    def _is_complete(self) -> bool:
        """Whether the text is one, and no longer text begins with it. Some grammars tell only by their next mask."""
        assert self.matcher is not None
        if not self.matcher.is_accepting() or self.matcher.is_stopped():
            return self.matcher.is_accepting()
        tried = self.matcher.deep_copy()
        mask = tried.compute_bitmask()
        if tried.is_error():  # the text's own next mask finds out why
            return False
        return int(np.bitwise_count(np.frombuffer(mask, dtype=np.uint8)).sum()) <= self._compiled.num_ends
