"""What a step computes, in the few numbers that its duration depends on."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.plan import StepPlan


class StepShape(NamedTuple):
    """num_rows: tokens of running sequences, drafts included. num_context_tokens: positions that its decode rows attend
    to, their own included. num_prompt_tokens: of all its chunks. num_prompt_pairs: (query, key) pairs of its chunks'
    causal attention. num_earlier_pairs: of these, whose keys earlier chunks of their prompts have left in the pool.
    """

    num_rows: int = 0
    num_context_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_earlier_pairs: int = 0

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        """O(rows + chunks)."""
        num_tokens = num_pairs = num_earlier = 0
        for chunk in plan.chunks:
            num_tokens += chunk.num_tokens
            num_pairs += prompt_pairs(chunk.start, chunk.num_tokens)
            num_earlier += chunk.num_tokens * chunk.start
        rows = plan.rows
        num_rows = sum([row.num_tokens for row in rows]) if plan.has_drafts else len(rows)
        num_context = sum([row.start + row.num_tokens for row in rows])
        return StepShape(num_rows, num_context, num_tokens, num_pairs, num_earlier)


def prompt_pairs(start: int, length: int) -> int:
    """(query, key) pairs of the tokens [start, start + length) of a prompt, whose attention is causal."""
    return length * start + length * (length + 1) // 2
