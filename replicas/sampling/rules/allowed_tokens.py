"""allowed_token_ids: every other token is forbidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from replicas.device_copy import to_device
from replicas.sampling.rules.token_rule import RuledRow, TokenRule
from scheduler.plan import SlotInit


@dataclass(frozen=True, slots=True)
class AllowedTokens(TokenRule):
    """token_ids: int64 [n]."""

    reads_history: ClassVar[bool] = False
    token_ids: Tensor

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        allowed = init.sampling.allowed_token_ids
        return cls(to_device(torch.tensor(allowed, dtype=torch.int64), device)) if allowed else None

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        for row in rows:
            scores = logits[row.index]
            kept = scores[row.rule.token_ids]
            scores.fill_(-torch.inf)
            scores[row.rule.token_ids] = kept
