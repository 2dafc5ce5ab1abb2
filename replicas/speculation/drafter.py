"""What makes drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftRow:
    slot: int
    choice: int
    num_drafts: int
