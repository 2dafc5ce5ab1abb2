"""What a replica drafts with, by its settings: a drafter for its runner, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from replicas.kv.kv_pool import KvLayout, KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model.weights_digest import digest_weights
from replicas.model_support import naming_failures
from replicas.settings import EngineSettings
from replicas.speculation.draft_loading import LoadedDraft, load_draft, load_head
from replicas.speculation.draft_model import DraftModel
from replicas.speculation.draft_model_counts import DraftModelCounts
from replicas.speculation.drafter import Drafter
from replicas.speculation.eagle3_head import Eagle3Head
from replicas.speculation.history import TokenHistory
from replicas.speculation.ngram_drafter import NgramDrafter
from replicas.start_step import start_step

# Of a loaded model, a pool for it, slots, tokens of a sequence: what computes it.
MakeRunner = Callable[[LoadedModel, KvPool, int, int], ModelRunner]

_Runner = TypeVar("_Runner", bound=ModelRunner)

if TYPE_CHECKING:
    from replicas.cuda.card_drafts import CardDrafting


class CannotDraft(Exception):
    """The settings ask for drafts that nothing here makes; says what to set."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """draft: the draft model, where the settings have one. As many blocks are there for its KV as for the served
    model's: each sequence has room in both, or in neither. head: of EAGLE-3; it has a layer of each block, and is there
    wherever tokens are computed.
    """

    settings: EngineSettings
    draft: LoadedDraft | None = None
    served_vocab_size: int = 0
    head: Eagle3Head | None = None
    counts: DraftModelCounts = field(default_factory=DraftModelCounts)  # of the draft model

    @staticmethod
    def by(settings: EngineSettings, served: LoadedModel, device: torch.device) -> Drafting | None:
        """None where it does not matter whether anything is drafted: but for a head that is so where no answers are
        decoded. Blocks for a model's loading. Raises CannotDraft, and as `load_draft` and `load_head`."""
        speculative = settings.speculative
        method, source = speculative.method, speculative.model
        if method == "none" or (not (settings.pool == "decode" or settings.may_also) and method != "eagle3"):
            return None
        if method == "grammar" and device.type != "cpu":
            raise CannotDraft("speculative.method grammar is for CPUs so far; on a card set ngram, or none")
        if method in ("ngram", "grammar"):
            return Drafting(settings)
        assert source is not None, "the config has seen to it"
        if method == "eagle3":
            if settings.layout == "two_lanes":
                raise CannotDraft("speculative.method eagle3 needs one lane; set layout: colocated, or method: ngram")
            with start_step("loading the EAGLE-3 head"):
                return Drafting(settings, head=load_head(source, served, device))
        with start_step("loading the draft model"):
            draft = load_draft(source, settings.model, served, device)
        return Drafting(settings, draft, served.vocab_size)

    @property
    def block_bytes(self) -> int:
        """Of the draft's KV, beside each block of the pool."""
        if self.draft is None:
            return 0
        return self.draft.loaded.kv_layout(self.settings.kv.block_size).block_bytes

    def widened(self, layout: KvLayout) -> KvLayout:
        """Of a pool's blocks, with a layer for the head: those with other heads, or none, can't exchange blocks."""
        if self.head is None:
            return layout
        return replace(layout, num_extra_layers=1, extra_name=digest_weights(self.head))

    def of_runner(self, pool: KvPool, make_runner: MakeRunner) -> dict[str, Any]:
        """What a runner for the served model's pool is told of its drafts, as `make_runner` calls it; that one makes a
        draft model's. Blocks, allocates and raises as `drafter_maker`."""
        if pool.tensor.is_cuda:
            on_card = self.on_card(pool)
            return {"head": self.head, "card_drafting": lambda: on_card}
        return {
            "head": self.head,
            "make_drafter": self.drafter_maker(pool.num_blocks, pool.tensor.device, make_runner),
        }

    def drafter_maker(
        self, num_blocks: int, device: torch.device, make_runner: MakeRunner
    ) -> Callable[[TokenHistory], Drafter | None] | None:
        """Makes the drafter when it is given the slots' history, or none; None where the head is the drafter. Blocks: a
        draft model is checked and warmed up here. Allocates its pool. Raises as `self_check`."""
        if self.head is not None:
            return None
        speculative = self.settings.speculative
        if speculative.method == "grammar":
            return lambda _: None
        if self.draft is None:
            return lambda history: NgramDrafter(history, speculative.ngram_min, speculative.ngram_max)
        runner = self._checked(self.draft, num_blocks, device, make_runner)
        sizes = (self.draft.max_len, self.draft.loaded.vocab_size, self.served_vocab_size)
        return lambda history: DraftModel(runner, history, *sizes, self.counts)

    def on_card(self, pool: KvPool) -> CardDrafting:
        """The same for a runner on a card. pool: the served model's."""
        # Their kernels need triton, which a CPU torch lacks.
        from replicas.cuda.card_draft_model import CardDraftModel
        from replicas.cuda.card_drafts import CardDrafting
        from replicas.cuda.card_eagle3 import CardEagle3
        from replicas.cuda.card_ngram_drafter import CardNgramDrafter
        from replicas.cuda.draft_model_runner import DraftModelRunner

        speculative, head, draft = self.settings.speculative, self.head, self.draft
        most = speculative.max_drafts
        if head is not None:
            return CardDrafting(lambda slots: CardEagle3(head, pool, slots, most), most, is_told=False)
        if draft is not None:
            runner = self._checked(draft, pool.num_blocks, pool.tensor.device, DraftModelRunner)
            sizes = (draft.max_len, self.served_vocab_size, most)
            return CardDrafting(lambda slots: CardDraftModel(runner, slots, *sizes, self.counts), most, is_told=False)
        ngrams = (most, speculative.ngram_min, speculative.ngram_max)
        return CardDrafting(lambda slots: CardNgramDrafter(slots, *ngrams), most, is_told=False)

    def _checked(
        self, draft: LoadedDraft, num_blocks: int, device: torch.device, make_runner: Callable[..., _Runner]
    ) -> _Runner:
        """What computes the draft model, checked and warm, with a pool of so many blocks. make_runner: as MakeRunner.
        Blocks. Allocates. Raises as `self_check`."""
        loaded = draft.loaded
        pool = KvPool(loaded.kv_layout(self.settings.kv.block_size), num_blocks, device)
        runner = make_runner(loaded, pool, self.settings.max_running_sequences, draft.max_len)
        with start_step("self-check of the draft model"), naming_failures("speculative.model", "its self-check"):
            self_check(runner, loaded)
            if runner.warm_up():
                self_check(runner, loaded)
        pool.tensor.zero_()
        return runner
