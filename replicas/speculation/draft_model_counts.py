"""What came of a draft model, counted. No torch: metrics are named without it."""

from __future__ import annotations

from dataclasses import dataclass

UNDRAFTED_CAUSES = ("no_blocks", "catching_up", "beyond_reach")


@dataclass(slots=True)
class DraftModelCounts:
    """Since the start. Rows that were to have drafts and have none, by their cause; a row counts in each step anew."""

    prompt_tokens: int = 0  # tokens of sequences that were computed, drafts apart
    no_blocks: int = 0  # the pool was full
    catching_up: int = 0  # the draft model had not read all of it yet
    beyond_reach: int = 0  # too long for it, or with a token that it does not know

    @property
    def undrafted(self) -> dict[str, int]:
        """Rows without drafts, by cause."""
        return {cause: getattr(self, cause) for cause in UNDRAFTED_CAUSES}
