"""How long an engine step takes, by what is in it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from cluster.config_section import Section
from scheduler.plan import StepPlan

Cost = Annotated[float, Field(ge=0, le=3_600)]


class StepShape(NamedTuple):
    """What a step computes.

    num_context_tokens: positions that its decode rows attend to, their own included. num_prompt_tokens: of all its
    chunks. num_prompt_pairs: (query, key) pairs of its chunks' causal attention.
    """

    num_rows: int = 0
    num_context_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        """O(rows + chunks)."""
        num_tokens = num_pairs = 0
        for chunk in plan.chunks:
            length = len(chunk.token_ids)
            num_tokens += length
            num_pairs += prompt_pairs(chunk.start, length)
        return StepShape(len(plan.rows), sum(row.position + 1 for row in plan.rows), num_tokens, num_pairs)


def prompt_pairs(start: int, length: int) -> int:
    """(query, key) pairs of the tokens [start, start + length) of a prompt."""
    return length * start + length * (length + 1) // 2


class StepModel(Section):
    """step time = base + row * rows + context_token * context + prompt_token * prompt tokens + prompt_pair * pairs.

    The shape of a roofline: base is the weights' memory traffic and the launches, context_token the KV cache's traffic,
    prompt_token and prompt_pair the arithmetic. All in seconds.
    """

    base_s: Cost = Field(description="Every step")
    row_s: Cost = Field(default=0.0, description="Each sequence that gets a token")
    context_token_s: Cost = Field(default=0.0, description="Each position that such a sequence attends to")
    prompt_token_s: Cost = Field(default=0.0, description="Each prompt token computed")
    prompt_pair_s: Cost = Field(default=0.0, description="Each pair of the prompts' causal attention")
    overhead_s: Cost = Field(
        default=0.0, description="Host work between two steps; with lag 1 it is hidden behind the step in flight"
    )

    def step_s(self, num_rows: int, num_context_tokens: int, num_prompt_tokens: int = 0, num_pairs: int = 0) -> float:
        """Seconds of a step of this StepShape."""
        return (
            self.base_s
            + self.row_s * num_rows
            + self.context_token_s * num_context_tokens
            + self.prompt_token_s * num_prompt_tokens
            + self.prompt_pair_s * num_pairs
        )
