"""The model runner of a CPU with drafts: rows lie where their slots are, and drafts that are found become guesses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from replicas.kv.host_pool import MovedBlocks
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ForwardHandle, ModelRunner, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace, counting
from replicas.speculation.draft_model import DraftModel
from replicas.speculation.drafter import Drafter, DraftRow
from replicas.speculation.history import TokenHistory
from scheduler.plan import Slice, SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class DraftingRunner(ModelRunner):
    """As its base, which knows rows with guesses. Threads as its base."""

    takes_forced = True

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        num_slots: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        *,
        make_drafter: Callable[[TokenHistory], Drafter | None],
    ) -> None:
        """make_drafter: is given the slots' history, which the runner keeps. None, which it may give: drafts are only
        what grammars force."""
        super().__init__(loaded, pool, num_slots, max_model_len, num_host_blocks)
        self._history = TokenHistory(num_slots, max_model_len)
        self._drafter: Drafter | None = make_drafter(self._history)  # None, too, once it has failed
        self._num_failed = 0

    def can_draft(self, sampling: SamplingParams) -> bool:
        return self._drafter is not None

    @property
    def num_failed_drafters(self) -> int:
        return self._num_failed

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        if isinstance(self._drafter, DraftModel):
            try:
                self._drafter.expect(slot, prompt_ids)
            except Exception as error:
                self._give_up(error)

    def read_ahead(self) -> bool:
        if not isinstance(self._drafter, DraftModel):
            return False
        try:
            return self._drafter.read_ahead()
        except Exception as error:
            self._give_up(error)
            return False

    def _prepare(self, plan: StepPlan) -> MovedBlocks | None:
        moved = super()._prepare(plan)
        self._start(plan.slot_inits)
        return moved

    def _run(self, plan: StepPlan) -> ForwardHandle:
        return super()._run(self._resolved(plan))

    @torch.inference_mode()
    def choose(self, forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        """As the base's. masks: by rows of the plan as it was made, with all its drafts."""
        if masks is not None and forwarded.plan.has_drafts:
            masks = masks.at(computed_rows(forwarded.plan))
        handle = super().choose(forwarded, masks)
        if forwarded.logits is not None:
            self._remember(forwarded.plan, handle.read_tokens())
        return handle

    # -- a plan as it is computed ------------------------------------------------------------------

    def _resolved(self, plan: StepPlan) -> StepPlan:
        """Its rows where they are, with the drafts that there are for them. One that is resolved already as it is."""
        rows = plan.rows
        if not rows:
            return plan
        drafts = self._drafts(rows) if plan.has_drafts else {}
        lengths = self._slots.length[[row.slot for row in rows]].tolist()
        resolved = [
            _resolved_row(row, length if length >= 0 else row.start, drafts.get(row.slot, ()))
            for row, length in zip(rows, lengths, strict=True)
        ]
        return replace(plan, slices=(*resolved, *plan.chunks))

    def _drafts(self, rows: Iterable[Slice]) -> dict[int, tuple[int, ...]]:
        """By slot, of the rows that may have some and have none yet. (Of a request with a grammar that is over nobody
        keeps a history.)"""
        asking = [
            DraftRow(row.slot, row.choice, row.num_drafts)
            for row in rows
            if _is_open(row) and row.slot in self._history
        ]
        if not asking or self._drafter is None:
            return {}
        try:
            found = zip(asking, self._drafter.draft(asking).tolist(), strict=True)
            return {row.slot: self._tokens(drafts[: row.num_drafts]) for row, drafts in found}
        except Exception as error:
            self._give_up(error)
            return {}

    def _tokens(self, drafts: list[int]) -> tuple[int, ...]:
        """Up to NO_DRAFT, or what else is no token."""
        vocab_size = self._loaded.vocab_size
        end = next((index for index, id_ in enumerate(drafts) if not 0 <= id_ < vocab_size), len(drafts))
        return tuple(drafts[:end])

    # -- what drafts are made by -------------------------------------------------------------------

    def _start(self, inits: Iterable[SlotInit]) -> None:
        for init in inits:
            self._history.start(init)
            if init.may_draft and self._drafter is not None:
                try:
                    self._drafter.start(init)
                except Exception as error:
                    self._give_up(error)

    def _remember(self, plan: StepPlan, token_ids: list[int]) -> None:
        """The step's tokens that count are history. Raises nothing: the slots have them already."""
        places = SamplePlace.all_of(plan)
        taken: dict[int, list[int]] = {}
        for place, token_id, counts in zip(places, token_ids, counting(places, token_ids), strict=True):
            if counts and place.next_slot in self._history:
                taken.setdefault(place.next_slot, []).append(max(token_id, 0))  # a row that failed is over
        if not taken:
            return
        slots, counts_of = list(taken), np.array([len(tokens) for tokens in taken.values()])
        tokens = np.zeros((len(slots), counts_of.max()), dtype=np.int64)
        for row, ids in enumerate(taken.values()):
            tokens[row, : len(ids)] = ids
        self._history.append(np.array(slots), tokens, counts_of)
        if self._drafter is not None:
            try:
                self._drafter.accepted(slots, torch.from_numpy(tokens), torch.from_numpy(counts_of))
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._drafter = None
        self._num_failed += 1
        logger.error("the drafter failed: no more drafts", exc_info=error, extra={"event": "drafter_failed"})


def _is_open(row: Slice) -> bool:
    """Whether drafts are wanted that nobody has looked for."""
    return row.num_drafts > 0 and row.num_tokens == 1 + row.num_drafts and not row.token_ids


def _resolved_row(row: Slice, start: int, drafts: tuple[int, ...]) -> Slice:
    if _is_open(row):
        count = 1 + len(drafts)
        return row._replace(start=start, num_tokens=count, num_sampled=count, token_ids=drafts)
    return row if row.start == start else row._replace(start=start)


def computed_rows(plan: StepPlan) -> list[int]:
    """Of each row of logits of a plan, as it was made, which one of the resolved plan's it is. (A draft that was not
    found is the last one that was: nobody asks for it.)"""
    rows: list[int] = []
    first = 0
    for part in plan.slices:
        rows += [first + min(index, part.num_sampled - 1) for index in range(part.most_sampled)]
        first += part.num_sampled
        rows += range(first, first + len(part.forks))
        first += len(part.forks)
    return rows
