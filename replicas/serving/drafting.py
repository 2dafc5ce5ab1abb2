"""What a replica drafts with, by its settings: a drafter for its runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas.settings import EngineSettings
from replicas.speculation.drafter import Drafter
from replicas.speculation.history import TokenHistory
from replicas.speculation.ngram_drafter import NgramDrafter

if TYPE_CHECKING:
    from replicas.cuda.card_drafts import CardDrafting


class CannotDraft(Exception):
    """The settings ask for drafts that nothing here makes; says what to set."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where answers are decoded."""

    settings: EngineSettings

    @staticmethod
    def by(settings: EngineSettings) -> Drafting | None:
        """None where nothing is drafted. Raises CannotDraft."""
        method = settings.speculative.method
        if settings.pool != "decode" or method == "none":
            return None
        if method != "ngram":
            raise CannotDraft(f"speculative.method {method}: nothing here drafts so; set ngram, or none")
        return Drafting(settings)

    def on_card(self) -> CardDrafting:
        """The same for a runner on a card."""
        from replicas.cuda.card_drafts import CardDrafting  # its kernels need triton, which a CPU torch lacks
        from replicas.cuda.card_ngram_drafter import CardNgramDrafter

        speculative = self.settings.speculative
        sizes = (speculative.max_drafts, speculative.ngram_min, speculative.ngram_max)
        return CardDrafting(lambda slots: CardNgramDrafter(slots, *sizes), speculative.max_drafts, is_told=False)

    def make_drafter(self, history: TokenHistory) -> Drafter:
        speculative = self.settings.speculative
        return NgramDrafter(history, speculative.ngram_min, speculative.ngram_max)
