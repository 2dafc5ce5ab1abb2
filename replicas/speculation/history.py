"""The tokens so far of every slot that may have drafts, which are looked for in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.plan import SlotInit

TokenIds = NDArray[np.int32]


class TokenHistory:
    """Of a slot: what its client expects the answer to be like, the prompt, and the output that counts, one behind the
    other. In host memory; made only where there are drafts: 8 bytes for each slot and position, once they are used.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        """max_len: of prompt and output; as much again is there for what is expected, which is cut at that."""
        self._max_expected = max_len
        self._tokens = np.zeros((num_slots, 2 * max_len), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    def __contains__(self, slot: int) -> bool:
        """Whether its sequence may have drafts."""
        return bool(self._lengths[slot])

    def start(self, init: SlotInit) -> None:
        """A sequence takes a slot. Mutates."""
        if not init.may_draft:
            self._lengths[init.slot] = 0
            return
        context = init.context
        last = () if init.last_token is None else (init.last_token,)
        ids = (*context.predicted_ids[: self._max_expected], *context.prompt_ids, *last)
        self._tokens[init.slot, : len(ids)] = ids
        self._lengths[init.slot] = len(ids)

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """The first counts[i] of tokens[i] follow in slots[i], which differ. tokens: [n, k]. Mutates."""
        starts = self._lengths[slots]
        for column in range(tokens.shape[1]):
            has_one = counts > column
            self._tokens[slots[has_one], starts[has_one] + column] = tokens[has_one, column]
        self._lengths[slots] = starts + counts

    def of(self, slot: int) -> TokenIds:
        """A view, int32 [length]: until the slot's next token."""
        return self._tokens[slot, : self._lengths[slot]]
