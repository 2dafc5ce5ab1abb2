"""logit_bias: something is added to the logits of some tokens, as OpenAI's API has it."""

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
class LogitBias(TokenRule):
    """token_ids: int64 [n]. biases: float32 [n]. An id that comes twice gets both."""

    reads_history: ClassVar[bool] = False
    token_ids: Tensor
    biases: Tensor

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        pairs = init.sampling.logit_bias
        if not pairs:
            return None
        token_ids = torch.tensor([token_id for token_id, _ in pairs], dtype=torch.int64)
        biases = torch.tensor([bias for _, bias in pairs], dtype=torch.float32)
        return cls(to_device(token_ids, device), to_device(biases, device))

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        for row in rows:
            logits[row.index].index_add_(0, row.rule.token_ids, row.rule.biases)
