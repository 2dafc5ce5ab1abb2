"""Drafts by n-grams: what followed the last time that the text stood as it stands now.

The rule, which a card's kernel shares: of the sizes ngram_max .. ngram_min the largest n of which the last n tokens
occur earlier; of these occurrences the most recent; the drafts are the tokens behind it, up to the end of the history.
(Prompt lookup decoding, Saxena 2023; transformers and vLLM take the earliest occurrence.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.history import TokenHistory, TokenIds
from scheduler.plan import SlotInit


class NgramDrafter:
    """Over a history that its runner keeps. Nothing to compute, nothing to remember."""

    def __init__(self, history: TokenHistory, ngram_min: int, ngram_max: int) -> None:
        """Raises ValueError unless 1 <= ngram_min <= ngram_max."""
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"n-grams of {ngram_min} to {ngram_max} tokens")
        self._history, self._ngram_min, self._ngram_max = history, ngram_min, ngram_max

    def start(self, init: SlotInit) -> None:
        """The history knows."""

    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        found = [self._follow(row) for row in rows]
        drafts = torch.full((len(rows), max(map(len, found), default=0)), NO_DRAFT, dtype=torch.int64)
        for index, tokens in enumerate(found):
            if len(tokens):
                drafts[index, : len(tokens)] = torch.from_numpy(tokens)
        return drafts

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """The history knows."""

    def _follow(self, row: DraftRow) -> TokenIds:
        history = self._history.of(row.slot)
        start = last_occurrence(history, self._ngram_min, self._ngram_max)
        return history[start : start + row.num_drafts]


def last_occurrence(history: TokenIds, ngram_min: int, ngram_max: int) -> int:
    """Where what followed begins: behind the most recent earlier occurrence of the longest n-gram, of ngram_min to
    ngram_max tokens, that the history ends with; its length if there is none. O(history).
    """
    length = len(history)
    # Ends of what matches so far: first of the last token alone, then of one more each.
    ends = np.flatnonzero(history[: length - 1] == history[-1]) if length > ngram_min else np.empty(0, dtype=np.int64)
    longest = ends if ngram_min == 1 else ends[:0]
    for size in range(2, min(ngram_max, length - 1) + 1):
        if not len(ends):
            break
        ends = ends[ends >= size - 1]
        ends = ends[history[ends - (size - 1)] == history[length - size]]
        if size >= ngram_min and len(ends):
            longest = ends
    return int(longest[-1]) + 1 if len(longest) else length
