"""What a bare engine drafts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ModelRunner
from replicas.serving.device_runner import speculation_of
from replicas.speculation.drafter import Drafter
from replicas.speculation.eagle3_head import Eagle3Head
from replicas.speculation.history import TokenHistory
from scheduler.constant_drafts import ConstantDrafts
from scheduler.draft_planner import Speculation

if TYPE_CHECKING:
    from replicas.cuda.card_drafts import CardDrafting


@dataclass(frozen=True, slots=True)
class Drafts:
    """make_drafter, card_drafting: as `make_runner` wants them, for a CPU and a card; the latter is given the pool.
    max_drafts: of a row. constant: every row has so many; None: as many as pay. make_head: of the served model an
    EAGLE-3 head, which drafts instead."""

    max_drafts: int
    make_drafter: Callable[[TokenHistory], Drafter] | None
    card_drafting: Callable[[KvPool], CardDrafting] | None
    constant: int | None = None
    make_head: Callable[[LoadedModel], Eagle3Head] | None = None

    def on_card(self, pool: KvPool, head: Eagle3Head | None) -> Callable[[], CardDrafting] | None:
        if head is not None:
            return lambda: head_on_card(head, pool, self.max_drafts)
        return None if self.card_drafting is None else partial(self.card_drafting, pool)

    def speculation(self, runner: ModelRunner) -> Speculation:
        chosen = speculation_of(runner, self.max_drafts)
        return chosen if self.constant is None else replace(chosen, speculator=ConstantDrafts(self.constant))


def head_on_card(head: Eagle3Head, pool: KvPool, max_drafts: int) -> CardDrafting:
    """What drafts by a head whose layer is in the pool."""
    from replicas.cuda.card_drafts import CardDrafting
    from replicas.cuda.card_eagle3 import CardEagle3

    return CardDrafting(lambda slots: CardEagle3(head, pool, slots, max_drafts), max_drafts, is_told=False)
