"""As many drafts in every row, whatever comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.speculation import RowSpeculation, SpeculationState


@dataclass(frozen=True, slots=True)
class ConstantDrafts:
    """As `draft_planner.ChoosesDrafts`."""

    num_drafts: int

    @property
    def num_rests(self) -> int:
        """None ever does."""
        return 0

    def choose(
        self, rows: Sequence[RowSpeculation], num_context_tokens: int, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        return tuple([min(row.most, self.num_drafts) for row in rows])

    def accepted(self, state: SpeculationState, num_planned: int, num_drafted: int, num_accepted: int) -> None:
        """Nothing is learned."""

    def step_took(self, num_drafts: int, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """Nothing is learned."""
