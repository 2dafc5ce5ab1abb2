"""thinking_token_budget: a model that has thought for so many tokens is made to stop thinking, as vLLM has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from replicas.sampling.rules.token_rule import RuledRow, TokenRule
from scheduler.plan import SlotInit
from scheduler.thinking_budget import ThinkingBudget


@dataclass(frozen=True, slots=True)
class ThinkingTime(TokenRule):
    """output_start: position of the first token of the output."""

    reads_history: ClassVar[bool] = True
    budget: ThinkingBudget
    output_start: int

    @classmethod
    def asked_by(cls, init: SlotInit, device: torch.device) -> Self | None:
        budget = init.sampling.thinking
        return None if budget is None else cls(budget, init.context.output_start)

    @classmethod
    def apply(cls, logits: Tensor, rows: Sequence[RuledRow[Self]], history: Tensor) -> None:
        for row in rows:
            budget, start = row.rule.budget, row.rule.output_start
            if row.position - start < budget.num_tokens + (not budget.is_opened):
                continue  # there has not been so much
            output = history[row.slot, start : row.position]
            at = torch.arange(1, row.position - start + 1, device=output.device)  # 0 stands for "nowhere"
            opened = torch.where(output == budget.opener_id, at, 0).amax() if len(at) else at.sum()
            closed = torch.where(output == budget.closer_id, at, 0).amax() if len(at) else at.sum()
            is_open = (opened > closed) | ((closed == 0) & budget.is_opened)
            is_over = is_open & (len(at) - opened >= budget.num_tokens)
            scores = logits[row.index]
            closer = torch.where(is_over, 0.0, scores[budget.closer_id])
            scores.masked_fill_(is_over, -torch.inf)
            scores[budget.closer_id] = closer
