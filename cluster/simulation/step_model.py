"""How long an engine step takes, by what is in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.config.section import Section

Cost = Annotated[float, Field(ge=0, le=3_600)]


# Up to so many rows a product runs at the speed of memory-bound code, beyond at that of matrix code: no
# straight line through two sizes of batch foretells a third.
FEW_ROWS = 4


class StepModel(Section):
    """step time = base + row * rows + few_row * min(rows, FEW_ROWS) + context_token * context
    + prompt_token * prompt tokens - min(hidden, that) + prompt_pair * own pairs + earlier_pair * earlier pairs.

    The shape of a roofline: base is the weights' memory traffic and the launches, context_token the KV cache's traffic,
    prompt_token and both kinds of pairs the arithmetic, behind which hidden is the traffic that it hides. All in
    seconds.
    """

    base_s: Cost = Field(description="Every step")
    row_s: Cost = Field(default=0.0, description="Each sequence that gets a token, and each of its drafts")
    few_row_s: Cost = Field(default=0.0, description=f"Each of the first {FEW_ROWS} of them, more")
    context_token_s: Cost = Field(default=0.0, description="Each position that such a sequence attends to")
    prompt_token_s: Cost = Field(default=0.0, description="Each prompt token computed")
    drafting_s: Cost = Field(default=0.0, description="Each step whose sequences have drafts: what makes these")
    hidden_s: Cost = Field(
        default=0.0,
        description="Of base_s, what prompts hide as far as prompt_token_s of their tokens reaches: weights are read "
        "while they are multiplied",
    )
    prompt_pair_s: Cost = Field(default=0.0, description="Each pair of the prompts' causal attention")
    earlier_pair_s: Cost | None = Field(
        default=None,
        description="Likewise, of a chunk's tokens and those of earlier chunks, whose KV is in the pool; "
        "none: as prompt_pair_s",
    )
    overhead_s: Cost = Field(
        default=0.0, description="Host work between two steps; with lag 1 it is hidden behind the step in flight"
    )
    contention: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="How many times as long a step takes beside a step of another pool: pools that share "
        "a machine's cores or memory bandwidth. 1: they do not",
    )

    def slower(self, factor: float) -> StepModel:
        """The same steps, so many times as long; below 1, shorter."""
        times_s = {name: value for name, value in self.model_dump(exclude_none=True).items() if name.endswith("_s")}
        return self.model_copy(update={name: value * factor for name, value in times_s.items()})

    def step_s(
        self,
        num_rows: int,
        num_context_tokens: int,
        num_prompt_tokens: int = 0,
        num_pairs: int = 0,
        num_earlier_pairs: int = 0,
    ) -> float:
        """Seconds of a step of this StepShape."""
        rows_s = (
            self.base_s
            + self.row_s * num_rows
            + self.few_row_s * min(num_rows, FEW_ROWS)
            + self.context_token_s * num_context_tokens
        )
        if not num_prompt_tokens:
            return rows_s
        tokens_s = self.prompt_token_s * num_prompt_tokens
        earlier_pair_s = self.prompt_pair_s if self.earlier_pair_s is None else self.earlier_pair_s
        pairs_s = self.prompt_pair_s * (num_pairs - num_earlier_pairs) + earlier_pair_s * num_earlier_pairs
        return rows_s + tokens_s - min(self.hidden_s, self.base_s, tokens_s) + pairs_s
