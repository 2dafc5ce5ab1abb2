"""Masks of many texts at once: which tokens may come next, a bit for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from replicas.grammars.followed_text import FollowedText


class MaskMaker:
    """One thread at a time; the work is shared by threads of its own, and other Python threads run meanwhile."""

    def __init__(
        self, tokenizer: LLTokenizer, num_threads: int, new_words: Callable[[int, int], NDArray[np.int32]]
    ) -> None:
        """new_words: where masks are written, int32 [n, words]: on a card memory that it can read by itself."""
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._new_words = new_words
        self._executor = LLExecutor(num_threads)

    def masks(self, texts: Sequence[FollowedText]) -> tuple[list[int], NDArray[np.int32]]:
        """Which of the texts have a mask, and the masks, int32 [n, words], the lowest bit of a word first.

        The others may go on with any token, or have failed. Mutates the texts: they are up to their last token then.
        Blocks for 20 to 1000 microseconds for each, shared by the threads.
        """
        self._catch_up(texts)
        held = [index for index, text in enumerate(texts) if text.matcher is not None and text.failure is None]
        words = self._new_words(len(held), self._num_words)
        matchers = [(texts[index].matcher, place) for place, index in enumerate(held)]
        if len(held) == 1:  # no other thread need be woken
            fill_next_token_bitmask(matchers[0][0], words, 0)  # type: ignore[arg-type]
        elif held:
            fill_next_token_bitmask_par(self._executor, matchers, words)  # type: ignore[arg-type]
        for index in held:
            texts[index].check()
        if any(texts[index].failure is not None for index in held):
            alive = [place for place, index in enumerate(held) if texts[index].failure is None]
            held, words = [held[place] for place in alive], words[alive]
        return held, words

    def _catch_up(self, texts: Sequence[FollowedText]) -> None:
        """Texts with one token to go by, as each has in a step, go by it at the same time."""
        at_once = [text for text in texts if text.matcher is not None and len(text.pending) == 1]
        if len(at_once) > 1:
            self._executor.consume_token_par([(text.matcher, text.pending[0]) for text in at_once])  # type: ignore[misc]
            for text in at_once:
                text.pending.clear()
                text.consumed()
        for text in texts:
            if text.pending:
                text.catch_up()
