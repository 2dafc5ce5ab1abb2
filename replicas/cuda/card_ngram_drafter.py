"""Drafts by n-grams where the histories lie on the card: the same as `NgramDrafter` makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.kernels.ngram_search import follow_ngrams
from replicas.speculation.drafter import DraftRow
from scheduler.plan import SlotInit


class CardNgramDrafter:
    """Over the slots' histories. Nothing to compute, nothing to remember."""

    def __init__(self, slots: CudaSlots, max_drafts: int, ngram_min: int, ngram_max: int) -> None:
        """Blocks: compiles its kernel. Raises ValueError unless 1 <= ngram_min <= ngram_max."""
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"n-grams of {ngram_min} to {ngram_max} tokens")
        assert slots.history is not None, "n-grams need slots with histories"
        self._state, self._history, self._max_drafts = slots.state, slots.history, max_drafts
        self._ngram_min, self._ngram_max = ngram_min, ngram_max
        self.draft([DraftRow(0, 0, max_drafts)])

    def start(self, init: SlotInit) -> None:
        """The history knows."""

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        numbers = [[row.slot for row in rows], [row.num_drafts for row in rows]]
        slots, wanted = numbers_to_device(numbers, self._state.device).int()
        # Always as many columns: one kernel.
        drafts = follow_ngrams(
            self._history, self._state, slots, wanted, self._max_drafts, self._ngram_min, self._ngram_max
        )
        return drafts[:, : max(row.num_drafts for row in rows)]

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """The history knows."""
