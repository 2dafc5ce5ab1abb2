"""How many drafts rows get: what is known of each row, and who chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class SpeculationState:
    """What a request's drafts have come to so far. Mutated by its scheduler only."""

    num_drafted: int = 0
    num_accepted: int = 0

    def accepted(self, num_drafted: int, num_accepted: int) -> None:
        """Of a row, which may have had none: drafts that there were, and how many of them count. Mutates."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


class RowSpeculation(NamedTuple):
    """A row of the next step. most: drafts that it may have: its sequence ends, or the step has no room for more."""

    state: SpeculationState
    num_context_tokens: int
    most: int


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """max_drafts: of a row."""

    max_drafts: int

    def choose(self, rows: Sequence[RowSpeculation], times: Mapping[int, float]) -> tuple[int, ...]:
        """Drafts of each row, at most its `most`. times: measured seconds of a step, by its number of tokens. Pure."""
        return tuple([min(row.most, self.max_drafts) for row in rows])
