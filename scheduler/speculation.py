"""What is known of a row when its drafts are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class SpeculationState:
    """Of one request: what came of its drafts."""


class RowSpeculation(NamedTuple):
    """A row of the next step. position: of its last token, or more. most: drafts that it may have; 0: none."""

    state: SpeculationState
    position: int
    most: int
