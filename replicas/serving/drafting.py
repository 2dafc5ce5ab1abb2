"""What a replica drafts with, by its settings: a drafter for its runner."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.settings import EngineSettings
from replicas.speculation.drafter import Drafter
from replicas.speculation.history import TokenHistory
from replicas.speculation.ngram_drafter import NgramDrafter


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

    def make_drafter(self, history: TokenHistory) -> Drafter:
        speculative = self.settings.speculative
        return NgramDrafter(history, speculative.ngram_min, speculative.ngram_max)
