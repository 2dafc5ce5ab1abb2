"""repetition_penalty: what prompt or output already hold becomes less likely, or more.

Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", 2019, section 4.1, in the
form of transformers' RepetitionPenaltyLogitsProcessor: a negative logit is multiplied, since dividing would raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from replicas.sampling.rules.token_rule import PastTokens, RuledRow, TokenRule, column
from scheduler.plan import SlotInit


@dataclass(frozen=True, slots=True)
class RepetitionPenalty(TokenRule):
    """penalty: greater than 0."""

    reads_history: ClassVar[bool] = True
    penalty: float

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        penalty = init.sampling.repetition_penalty
        return cls(penalty) if penalty != 1.0 else None

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        past = PastTokens.of(rows, [0] * len(rows), history)
        penalty = column([row.rule.penalty for row in rows], logits.device)
        scores = logits[past.rows, past.ids]
        # An id that comes several times is written several times, each time the same.
        logits[past.rows, past.ids] = torch.where(scores < 0, scores * penalty, scores / penalty)
