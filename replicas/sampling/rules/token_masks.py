"""Which tokens the rows of a step may choose, a bit for each: what their grammars allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.device_copy import to_device


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """rows: those of the step's logits that have a mask, rising; the others choose freely. words: int32 [n, words] in
    the host's memory, token t is bit t % 32 of word t // 32; 1: allowed. There may be words beyond the vocabulary.
    """

    rows: tuple[int, ...]
    words: NDArray[np.int32]

    def forbid(self, logits: Tensor) -> None:
        """Set what is not allowed to -inf, float32 [R, V]. Mutates. Does not synchronise with the host."""
        vocab_size = logits.shape[1]
        if logits.device.type == "cpu":
            for row, words in zip(self.rows, self.words, strict=True):
                _forbid(logits[row], words)
            return
        words = to_device(torch.from_numpy(self.words), logits.device)
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = ((words[:, :, None] >> shifts) & 1).bool().view(len(self.rows), -1)[:, :vocab_size]
        rows = to_device(torch.tensor(self.rows), logits.device)
        logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)

    def places(self, num_rows: int) -> NDArray[np.int32]:
        """Of each of so many rows where in `words` its mask is; -1: it has none."""
        places = np.full(num_rows, -1, dtype=np.int32)
        places[list(self.rows)] = np.arange(len(self.rows), dtype=np.int32)
        return places

    def of_rows(self, first: int, num_rows: int) -> TokenMasks | None:
        """Those of rows [first, first + num_rows), which count from 0 then; None if none of them has one."""
        places = [place for place, row in enumerate(self.rows) if first <= row < first + num_rows]
        return TokenMasks(tuple(self.rows[place] - first for place in places), self.words[places]) if places else None

    def at(self, rows: Sequence[int]) -> TokenMasks:
        """The same masks, of rows of another count: rows[i] is where row i is in it."""
        return TokenMasks(tuple([rows[row] for row in self.rows]), self.words)

    def leaves_only(self, row: int, token_ids: Iterable[int]) -> bool:
        """Whether nothing but some of these tokens may come in this row. False of a row without a mask."""
        if row not in self.rows:
            return False
        others = self.words[self.rows.index(row)].copy()
        for id_ in token_ids:
            if id_ < 32 * len(others):
                others[id_ // 32] &= ~np.int32(np.uint32(1 << (id_ % 32)).view(np.int32))
        return not others.any()


def _forbid(logits: Tensor, words: NDArray[np.int32]) -> None:
    """Of one row on the host, float32 [V]. Mutates it. 20 microseconds where few tokens are allowed, 100 at most."""
    is_allowed = np.unpackbits(words.view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    if 2 * int(np.bitwise_count(words.view(np.uint32)).sum()) > len(logits):
        logits.masked_fill_(torch.from_numpy(~is_allowed), -torch.inf)
        return
    (allowed,) = is_allowed.nonzero()
    values = logits.numpy()
    kept = values[allowed]
    values.fill(-np.inf)
    values[allowed] = kept
