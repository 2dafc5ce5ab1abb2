"""Masks of many texts at once: which tokens may come next, a bit for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from replicas.grammars.followed_text import FollowedText

# Where fewer can be worked on at the same time, waking other threads takes longer than they would save.
_WORTH_WAKING = 8


class MaskMaker:
    """One thread at a time; the work is shared by threads of its own, and other Python threads run meanwhile."""

    def __init__(
        self, tokenizer: LLTokenizer, num_threads: int, new_words: Callable[[int, int], NDArray[np.int32]]
    ) -> None:
        """num_threads: that share the work; 1: it is done on the caller's. new_words: where masks are written, int32
        [n, words]: on a card memory that it can read by itself."""
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._new_words = new_words
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None

    def masks(self, texts: Sequence[FollowedText]) -> tuple[list[int], NDArray[np.int32]]:
        """Which of the texts have a mask, and the masks, int32 [n, words], the lowest bit of a word first.

        The others may go on with any token, or have failed. Mutates the texts: they are up to their last token then.
        Blocks for 20 to 1000 microseconds for each, shared by the threads.
        """
        self.catch_up(texts)
        held = [index for index, text in enumerate(texts) if text.is_held and text.failure is None]
        words = self._new_words(len(held), self._num_words)
        self._fill([texts[index] for index in held], words)
        for place, index in enumerate(held):
            if texts[index].check():
                self._fill([texts[index]], words[place : place + 1])
                texts[index].check()
        if any(texts[index].failure is not None for index in held):
            alive = [place for place, index in enumerate(held) if texts[index].failure is None]
            held, words = [held[place] for place in alive], words[alive]
        return held, words

    def _fill(self, texts: Sequence[FollowedText], words: NDArray[np.int32]) -> None:
        """A mask of each, in its row of words. Mutates both."""
        unknown: dict[int, FollowedText] = {}
        for place, text in enumerate(texts):
            if (known := text.known_words) is None:
                unknown[place] = text
            else:
                words[place] = known
        first, num_bytes = words.ctypes.data, 4 * self._num_words
        if self._executor is not None and _is_worth_waking(list(unknown.values())):
            places = list(unknown)
            order = [places[index] for index in _side_by_side(list(unknown.values()))]
            rows = [(_matcher_of(unknown[place]), place) for place in order]
            self._executor.unsafe_compute_mask_ptr(rows, first, num_bytes, len(texts))
            return
        for place, text in unknown.items():
            _matcher_of(text).unsafe_compute_mask_ptr(first + place * num_bytes, num_bytes)

    def catch_up(self, texts: Sequence[FollowedText]) -> None:
        """Go by the tokens that they have taken. Mutates. Texts with one token to go by, as each has in a step, go by
        it at the same time."""
        at_once = [text for text in texts if text.is_held and len(text.pending) == 1]
        if self._executor is not None and _is_worth_waking(at_once):
            ordered = [at_once[place] for place in _side_by_side(at_once)]
            self._executor.consume_token_par([(_matcher_of(text), text.pending[0]) for text in ordered])
            for text in ordered:
                token_id = text.pending.pop()
                text.consumed(token_id)
        for text in texts:
            if text.pending:
                text.catch_up()


def _is_worth_waking(texts: Sequence[FollowedText]) -> bool:
    return len(texts) >= _WORTH_WAKING and len({text.waits_with for text in texts}) > 1


def _side_by_side(texts: Sequence[FollowedText]) -> list[int]:
    """Their places, those that wait for each other beside each other: each thread takes a run of them, so that few wait
    for another thread's."""
    return sorted(range(len(texts)), key=lambda place: texts[place].waits_with)


def _matcher_of(text: FollowedText) -> LLMatcher:
    assert text.matcher is not None
    return text.matcher
