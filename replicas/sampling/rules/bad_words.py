"""bad_words: token sequences that the output never completes, as transformers' NoBadWordsLogitsProcessor has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from replicas.device_copy import to_device
from replicas.sampling.rules.token_rule import RuledRow, TokenRule
from scheduler.plan import SlotInit

_ANYTHING = -1  # left of a prefix that is shorter than the longest
_NOTHING = -2  # left of a history that is shorter than the longest prefix: no token is this


@dataclass(frozen=True, slots=True)
class BadWords(TokenRule):
    """A word's last token is forbidden where prompt and output end with all its others.

    prefixes: int32 [n, length], each word but its last token, to the right, behind _ANYTHING. last_ids: int64 [n].
    """

    reads_history: ClassVar[bool] = True
    prefixes: Tensor
    last_ids: Tensor

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        words = init.sampling.bad_words
        if not words:
            return None
        length = max(len(word) for word in words) - 1
        prefixes = [[_ANYTHING] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
        last_ids = torch.tensor([word[-1] for word in words], dtype=torch.int64)
        table = torch.tensor(prefixes, dtype=torch.int32).view(len(words), length)
        return cls(to_device(table, device), to_device(last_ids, device))

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        for row in rows:
            prefixes = row.rule.prefixes
            length = prefixes.shape[1]
            end = history[row.slot, max(0, row.position - length) : row.position]
            end = pad(end, (length - len(end), 0), value=_NOTHING)
            matches = ((prefixes == end) | (prefixes == _ANYTHING)).all(dim=-1)
            # Two words with the same last token may match or not: adding minus infinity once is enough.
            forbidden = torch.where(matches, -torch.inf, 0.0)
            logits[row.index].index_add_(0, row.rule.last_ids, forbidden)
