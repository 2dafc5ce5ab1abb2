"""presence_penalty and frequency_penalty: what the output already holds becomes less likely, or more.

OpenAI's definition: logit - count x frequency_penalty - (1 if count > 0) x presence_penalty, where count is how often
the output so far, not the prompt, holds the token.
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
class OutputPenalties(TokenRule):
    """output_start: position of the first token of the output."""

    reads_history: ClassVar[bool] = True
    presence: float
    frequency: float
    output_start: int

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        params = init.sampling
        if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
            return None
        return cls(params.presence_penalty, params.frequency_penalty, init.context.output_start)

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        rows = [row for row in rows if row.position > row.rule.output_start]
        if not rows:
            return
        past = PastTokens.of(rows, [row.rule.output_start for row in rows], history)
        presence = column([row.rule.presence for row in rows], logits.device)
        frequency = column([row.rule.frequency for row in rows], logits.device)
        # [n, V], but only zeroed: counted and read at the tokens of the output.
        counts = torch.zeros(len(rows), logits.shape[1], device=logits.device)
        counts.scatter_add_(1, past.ids, past.is_counted.float())
        count = counts.gather(1, past.ids)
        penalty = count * frequency + (count > 0) * presence
        logits[past.rows, past.ids] = logits[past.rows, past.ids] - penalty
