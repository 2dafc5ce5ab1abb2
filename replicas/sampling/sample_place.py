"""Where in a step a token is chosen."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.plan import StepPlan


class SamplePlace(NamedTuple):
    """One row of a step's logits. slot: whose parameters, rules and history count; next_slot: who feeds the token.

    They differ where a prompt ends: its n first tokens are all chosen by the prompt's own slot.
    """

    slot: int
    choice: int
    position: int  # index in prompt + output of the token to choose
    next_slot: int

    @staticmethod
    def all_of(plan: StepPlan) -> list[SamplePlace]:
        """Of every token the plan chooses: its rows', then its chunks' targets'."""
        places = [SamplePlace(row.slot, row.choice, row.position + 1, row.slot) for row in plan.rows]
        for chunk in plan.chunks:
            position = chunk.start + len(chunk.token_ids)
            places += [SamplePlace(chunk.slot, t.choice, position, t.slot) for t in chunk.targets]
        return places
