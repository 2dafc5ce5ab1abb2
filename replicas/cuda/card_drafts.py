"""Drafts on a card: asked for before a step, laid out for it, and held against what it has chosen. Nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.cuda.tokens_in_flight import SettledTokens
from replicas.device_copy import to_device
from replicas.kernels.draft_acceptance import AcceptedRows, accept_drafts, follow_tokens
from replicas.kernels.row_feed import FedRows, PlannedRows, feed_rows
from replicas.kernels.work_sharing import WorkSharing
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.sampled_tokens import SampledTokens
from replicas.speculation.drafter import NO_DRAFT, Drafter, DraftRow, ExpectingDrafter
from scheduler.plan import Slice, SlotInit, StepPlan

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

MOST_ROWS = 256  # of a step with drafts; with more, rows have none
# Tokens of a step's rows, ascending: each gets a graph of its own, in which rows and drafts may be divided anyhow. Of
# few rows, and of many. Whether drafts pay there is not said here: steps are timed.
_FEW_ROWS = 80  # as many as attend by short tiles without drafts, whose graphs have 80 rows, then 96
_ROW_TOKENS = (3, 5, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320)
_MANY_ROW_TOKENS = (128, 192, 288, 384, 512, 640, 768)
MOST_ROW_TOKENS = _MANY_ROW_TOKENS[-1]  # the last graph's logits are 200 MB, with a vocabulary of 128k


class DraftShape(NamedTuple):
    """Of a pass of rows with drafts: how many rows, and tokens of all of them, there is room for."""

    num_rows: int
    num_tokens: int

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        return num_rows <= self.num_rows and num_tokens <= self.num_tokens


def draft_shapes(num_slots: int, max_drafts: int) -> list[DraftShape]:
    """Those that get a graph, in the order in which they are to be tried; the last one holds what any other does."""
    few, many = min(num_slots, _FEW_ROWS), min(num_slots, MOST_ROWS)
    of_few, of_many = few * (1 + max_drafts), many * (1 + max_drafts)
    sizes = sorted({*(size for size in _ROW_TOKENS if size < of_few), min(of_few, _ROW_TOKENS[-1])})
    shapes = [DraftShape(few, size) for size in sizes]
    most, least = min(of_many, _MANY_ROW_TOKENS[-1]), few if many > few else sizes[-1]
    if most > least:
        sizes = sorted({*(size for size in _MANY_ROW_TOKENS if least < size < most), most})
        shapes += [DraftShape(min(many, size), size) for size in sizes]
    return shapes


def columns_of(rows: Sequence[Slice], num_rows: int, num_tokens: int, padding_slot: int) -> list[list[int]]:
    """A plan's rows as PlannedRows has them, and in its order: slots, planned, choices, firsts, counts, of_token."""
    empty, counts = num_rows - len(rows), [row.num_tokens for row in rows]
    firsts = np.cumsum([0, *counts]).tolist()
    of_token = np.repeat(np.arange(len(rows)), counts).tolist()
    return [
        [row.slot for row in rows] + [padding_slot] * empty,
        [row.start for row in rows] + [-1] * empty,
        [row.choice for row in rows] + [0] * empty,
        firsts[:-1] + [0] * empty,
        counts + [0] * empty,
        of_token + [-1] * (num_tokens - firsts[-1]),
    ]


def refuse_guesses(plan: StepPlan, max_drafts: int) -> None:
    """Raises ValueError for rows of several tokens, but for those with as many drafts of the runner's own; and for
    chunks that are sampled from anywhere but their last position."""
    wide = [row for row in plan.rows if row.num_tokens > 1 and not _has_room_for_drafts(row, max_drafts)]
    wide = wide or [chunk for chunk in plan.chunks if chunk.num_sampled > 1]
    if wide:
        raise ValueError(
            f"{wide[0].request_id}: {wide[0].num_tokens} tokens, {wide[0].num_sampled} of them sampled behind: on CUDA "
            f"a running sequence is planned a token at a time, or with up to {max_drafts} drafts of the runner's own, "
            "and sampled behind its last token, and each of these, only"
        )


def _has_room_for_drafts(row: Slice, max_drafts: int) -> bool:
    count = 1 + row.num_drafts
    return row.num_drafts <= max_drafts and row.num_tokens == row.num_sampled == count and not row.token_ids


@dataclass(frozen=True, slots=True)
class CardDrafting:
    """make_drafter: is given slots with histories. max_drafts: of a row. is_told: whether the drafter wants to know
    what counts: telling it takes some small kernels a step."""

    make_drafter: Callable[[CudaSlots], Drafter]
    max_drafts: int
    is_told: bool = True


class CardDrafts:
    """Of one runner, or of the runners of both lanes, which share its slots. Threads: as those of the drafter."""

    def __init__(self, slots: CudaSlots, drafting: CardDrafting) -> None:
        assert slots.history is not None, "drafts need slots with histories"
        self._slots, self._history, self.max_drafts = slots, slots.history, drafting.max_drafts
        self._drafter: Drafter | None = drafting.make_drafter(slots)  # None once it has failed
        self.num_failed = 0  # drafters
        self._is_told = drafting.is_told
        self._started: set[int] = set()  # slots that the drafter knows

    @property
    def is_alive(self) -> bool:
        """Whether there may be any."""
        return self._drafter is not None

    @property
    def drafter(self) -> Drafter | None:
        """None once it has failed."""
        return self._drafter

    @property
    def most(self) -> int:
        """Tokens of a row."""
        return 1 + self.max_drafts

    def start(self, inits: Sequence[SlotInit]) -> None:
        """Before anything else of their step. Mutates."""
        for init in inits:
            self._started.discard(init.slot)
            if init.may_draft and self._drafter is not None:
                self._started.add(init.slot)
                self.asking(lambda drafter, init=init: drafter.start(init))  # type: ignore[misc]

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """As of an ExpectingDrafter, if it is one. Mutates."""
        if isinstance(expecting := self._drafter, ExpectingDrafter):
            self.asking(lambda _: expecting.expect(slot, prompt_ids))

    def read_ahead(self) -> bool:
        """Likewise."""
        expecting = self._drafter
        return isinstance(expecting, ExpectingDrafter) and bool(self.asking(lambda _: expecting.read_ahead()))

    def resolved(self, plan: StepPlan, most_tokens: int | None) -> StepPlan:
        """The plan as it is computed: without drafts where nobody makes any, or for so many rows, or rows' tokens, that
        no draft makes good what they cost. most_tokens: None: any number."""
        rows = plan.rows
        num_tokens = sum(row.num_tokens for row in rows)
        if self.is_alive and len(rows) <= MOST_ROWS and (most_tokens is None or num_tokens <= most_tokens):
            return plan
        alone = [row._replace(num_tokens=1, num_sampled=1) if row.num_drafts else row for row in rows]
        return replace(plan, slices=(*alone, *plan.chunks))

    def drafts(self, rows: Sequence[Slice], into: torch.Tensor) -> None:
        """What may follow each row, int64 [len(rows) or more, max_drafts], NO_DRAFT from where nothing is expected.
        Mutates into."""
        into.fill_(NO_DRAFT)
        asking = [index for index, row in enumerate(rows) if row.num_drafts]
        wanted = [DraftRow(row.slot, row.choice, row.num_drafts, row.start) for row in rows if row.num_drafts]
        if not wanted:
            return
        found = self.asking(lambda drafter: drafter.draft(wanted))
        if found is None or not found.shape[1]:
            return
        if len(asking) == len(rows):
            into[: len(rows), : found.shape[1]].copy_(found)
        else:
            into[:, : found.shape[1]].index_copy_(0, numbers_to_device(asking, into.device), found)

    def fed(self, rows: Sequence[Slice], sharing: WorkSharing) -> FedRows:
        """A plan's rows, to be computed by hand, with or without drafts."""
        device = self._slots.state.device
        drafts = torch.empty(len(rows), self.max_drafts, dtype=torch.int64, device=device)
        self.drafts(rows, drafts)
        num_tokens = sum(row.num_tokens for row in rows)
        columns = columns_of(rows, len(rows), num_tokens, self._slots.padding_slot)
        numbers = np.array([number for column in columns for number in column], dtype=np.int32)
        planned = PlannedRows.split(to_device(torch.from_numpy(numbers), device), len(rows), self.most)
        return self.laid_out(planned, drafts, sharing)

    def laid_out(self, planned: PlannedRows, drafts: torch.Tensor, sharing: WorkSharing) -> FedRows:
        """Where the rows are by now, with their drafts; and what attends over which of their keys."""
        shares = sharing.empty_shares(drafts.device)
        fed = feed_rows(self._slots.state, planned, drafts, shares, sharing.rows_at)
        sharing.share_out(fed.firsts, shares)
        return fed

    def settle(self, plan: StepPlan, fed: FedRows | None, choice: SampledTokens) -> SampledTokens:
        """What is chosen of a step's logits, in the plan's order. fed: its rows, if they may have drafts. Mutates the
        slots, which have the last tokens already."""
        places, accepted, first = SamplePlace.all_of(plan), None, 0
        if fed is not None:
            first = sum(row.num_sampled for row in plan.rows)
            accepted = self.accept(plan.rows, choice.tokens[:first], fed)
        used = [place.next_slot for place in places[first:]]
        if used:
            slots = numbers_to_device(used, choice.tokens.device).int()
            self.follow(used, choice.tokens[first:], slots, torch.zeros_like(slots))
        accepted = accepted if plan.has_drafts else None
        return SettledTokens(choice.tokens, choice.scored, choice.num_top, choice.scores, accepted)

    def accept(self, rows: Sequence[Slice], tokens: torch.Tensor, fed: FedRows) -> torch.Tensor:
        """Of these rows, the first ones that were fed: int32 [len(rows), 2], as `AcceptedRows.counts`. tokens: what was
        chosen, as `accept_drafts` wants it. Mutates the slots."""
        accepted = accept_drafts(tokens, fed, self._slots.state, self._history)
        if self._is_told:
            self._tell([row.slot for row in rows], accepted)
        return accepted.counts[: len(rows)]

    def follow(self, used: Sequence[int], tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """As `follow_tokens`: of slots that got a token each. used: these, without the padding behind them. Mutates the
        slots."""
        follow_tokens(tokens, slots, positions, self._slots.state, self._history)
        count = len(used)
        if self._is_told and self._started.intersection(used):
            ones = torch.ones(count, 2, dtype=torch.int32, device=tokens.device)
            self._tell(used, AcceptedRows(ones, tokens[:count, None].clamp(min=0)))

    def _tell(self, slots: Sequence[int], accepted: AcceptedRows) -> None:
        kept = [index for index, slot in enumerate(slots) if slot in self._started]
        if not kept or self._drafter is None:
            return
        counts, tokens = accepted.counts[: len(slots), 0].long(), accepted.tokens[: len(slots)]
        if len(kept) < len(slots):
            index = numbers_to_device(kept, counts.device)
            counts, tokens = counts[index], tokens[index]
        told = [slots[index] for index in kept]
        self.asking(lambda drafter: drafter.accepted(told, tokens, counts))

    def asking(self, ask: Callable[[Drafter], _T]) -> _T | None:
        """What it answers. None once the drafter has failed: that costs drafts, not text."""
        if self._drafter is None:
            return None
        try:
            return ask(self._drafter)
        except Exception as error:
            self._drafter = None
            self.num_failed += 1
            logger.error("the drafter failed: no more drafts", exc_info=error, extra={"event": "drafter_failed"})
            return None
