"""min_tokens: no stop token before so many have been generated: transformers' MinNewTokensLengthLogitsProcessor.

Where a grammar allows nothing but stop tokens, they come all the same: its text is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from replicas.device_copy import to_device
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.rules.token_rule import RuledRow, TokenRule
from scheduler.plan import SlotInit


@dataclass(frozen=True, slots=True)
class MinTokens(TokenRule):
    """stop_token_ids: int64 [n], forbidden up to and excluding position first_free. known_ids: the same ones."""

    reads_history: ClassVar[bool] = False
    stop_token_ids: Tensor
    first_free: int
    known_ids: tuple[int, ...]

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        stops = init.context.stop_token_ids
        if init.sampling.min_tokens <= 0 or not stops:
            return None
        first_free = init.context.output_start + init.sampling.min_tokens
        ids = tuple(sorted(stops))
        return cls(to_device(torch.tensor(ids, dtype=torch.int64), device), first_free, ids)

    def yields_to(self, masks: TokenMasks, row: int) -> bool:
        return masks.leaves_only(row, self.known_ids)

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        for row in rows:
            if row.position < row.rule.first_free:
                logits[row.index].index_fill_(0, row.rule.stop_token_ids, -torch.inf)
