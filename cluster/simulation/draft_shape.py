"""How simulated engines draft: as real ones, whose drafts hold by chance."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.root import Config
from scheduler.draft_planner import Speculation
from scheduler.sampling_params import SamplingParams
from scheduler.speculation import SpeculationPolicy
from scheduler.speculator import Speculator


@dataclass(frozen=True, slots=True)
class DraftShape:
    """max_drafts, max_rows, is_padded: as SpeculationPolicy has them."""

    max_drafts: int
    max_rows: int | None
    is_padded: bool

    @staticmethod
    def of(config: Config) -> DraftShape | None:
        """Of its decode pool; None: nothing is drafted: simulated requests have no grammars. Whoever else drafts, and
        how well, is the workload's."""
        if config.speculative.method in ("none", "grammar"):
            return None
        is_card = config.pools.decode.device == "cuda"
        return DraftShape(config.speculative.max_drafts, CARD_ROWS if is_card else None, is_card)

    def speculation(self) -> Speculation:
        """Of one engine: it learns."""
        policy = SpeculationPolicy(self.max_drafts, self.max_rows, self.is_padded)
        return Speculation(Speculator(policy), self.max_drafts, _can_draft, self.is_padded)


# Rows of a step on a card that may have drafts: for more there are no graphs.
CARD_ROWS = 64


def _can_draft(sampling: SamplingParams) -> bool:
    return True
