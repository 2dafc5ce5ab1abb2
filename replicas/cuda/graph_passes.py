"""Passes that are captured: what each reads from its static input, and what it is told for a plan.

Everything that differs from step to step lies in one int32 tensor, so that one pinned copy prepares a replay; beyond it
a pass reads nothing but the slots' matrix, the weights and the pool. Rows and tokens that a plan does not fill are
padding, at position -1: they write no KV, and nobody attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from replicas.cuda.attention import library_attention
from replicas.cuda.card_drafts import CardDrafts, DraftShape, columns_of
from replicas.cuda.slots import CudaSlots
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels.row_feed import FedRows, PlannedRows, locate_rows
from replicas.kernels.work_sharing import WorkSharing
from replicas.speculation.drafter import NO_DRAFT
from scheduler.plan import Slice

# Choices of a prompt's first token, beyond one, that there is room for.
_MORE_CHOICES = 7


class PassChunk(NamedTuple):
    """A prompt's chunk in a pass, behind its rows: token ids, padded; first token, length and position; slot [1]."""

    ids: torch.Tensor
    span: torch.Tensor
    slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """A launched pass. logits [samples or more, vocab_size], valid until the graph's next replay.

    slots, positions (of the token that was fed), choices: int32, one for each row of logits, padding included. fed: the
    rows, if they have drafts. step: what its layers were given; chunk: of its prompt, if it has one.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor
    fed: FedRows | None = None
    step: CudaStep | None = None
    chunk: PassChunk | None = None


class PassModel:
    """What all passes of a runner compute with."""

    def __init__(self, model: Any, slots: CudaSlots, sharing: WorkSharing, drafts: CardDrafts | None = None) -> None:
        """drafts: None where there never are any: then rows are where plans say."""
        self._model = model
        self.slots = slots
        self.drafts = drafts
        self.sharing = sharing
        self.device = slots.state.device
        self.no_shares = sharing.share_out(torch.full((1,), -1, dtype=torch.int32, device=self.device))
        self.no_chunks = torch.zeros(2, 3, dtype=torch.int32, device=self.device)

    def located(self, slots: torch.Tensor, planned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows of one token, int32 [R]: last tokens, and their places, int32 [2 * R], slots, then positions."""
        if self.drafts is not None and len(slots):
            return locate_rows(self.slots.state, slots, planned)
        return self.slots.last_token.index_select(0, slots), torch.cat([slots, planned])

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, keep: int | torch.Tensor, step: CudaStep
    ) -> torch.Tensor:
        """[samples, vocab_size] in the model's type."""
        with library_attention():
            output = self._model(
                input_ids=input_ids.long()[None],
                position_ids=positions.clamp(min=0).long()[None],
                use_cache=False,
                logits_to_keep=keep,
                paged=step,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class DecodePass:
    """A token for each of up to `size` rows."""

    def __init__(self, model: PassModel, size: int) -> None:
        self._model = model
        self._size = size
        self.static_input = self.values(()).to(model.device)
        self._layout = launches_of(model.sharing, size).pack()

    def values(self, rows: Sequence[Slice]) -> torch.Tensor:
        """The static input for these rows, in pinned memory."""
        padding = self._size - len(rows)
        return _pinned(
            [
                [row.slot for row in rows] + [self._model.slots.padding_slot] * padding,
                [row.start for row in rows] + [-1] * padding,
                [row.choice for row in rows] + [0] * padding,
            ]
        )

    def run(self) -> Pass:
        slots, positions, choices = self.static_input
        if self._model.drafts is None:
            input_ids, places = self._model.slots.last_token.index_select(0, slots), self.static_input[:2].view(-1)
        else:
            input_ids, places = self._model.located(slots, positions)
            positions = places[self._size :]
        shares = self._model.sharing.share_out(positions)
        table = self._model.slots.block_table
        step = CudaStep(table, places, self._model.no_chunks, shares, self._layout)
        return Pass(self._model.logits(input_ids, positions, 0, step), slots, positions, choices, step=step)


class DraftPass:
    """Rows with drafts behind their last tokens: as many of both as a shape holds, divided anyhow.

    Static input: the columns of PlannedRows. The drafts are a tensor of their own, which the drafter writes.
    """

    def __init__(self, model: PassModel, drafts: CardDrafts, shape: DraftShape) -> None:
        self._model, self._drafts = model, drafts
        self._num_rows, self._num_tokens = min(shape), shape.num_tokens
        self.drafts = torch.full((self._num_rows, drafts.max_drafts), NO_DRAFT, dtype=torch.int64, device=model.device)
        self.static_input = self.values(()).to(model.device)
        launches = launches_of(model.sharing, self._num_rows)
        self._layout = replace(
            launches, num_queries=self._num_tokens, most_queries=drafts.most, rows_at=model.sharing.rows_at
        ).pack()

    def values(self, rows: Sequence[Slice]) -> torch.Tensor:
        """The static input for these rows, in pinned memory."""
        columns = columns_of(rows, self._num_rows, self._num_tokens, self._model.slots.padding_slot)
        return _pinned([number for column in columns for number in column])

    def run(self) -> Pass:
        planned = PlannedRows.split(self.static_input, self._num_rows, self._drafts.most)
        fed = self._drafts.laid_out(planned, self.drafts, self._model.sharing)
        table = self._model.slots.block_table
        step = CudaStep(table, fed.places, self._model.no_chunks, fed.shares, self._layout)
        logits = self._model.logits(fed.ids, fed.positions, 0, step)
        return Pass(logits, fed.slots, fed.positions, fed.choices, fed, step)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """num_rows: decode rows that there is room for; length: tokens of one prompt's chunk. is_fresh: a library kernel
    attends, which knows no KV from before. num_earlier: it does so behind exactly so many tokens; 0 and not fresh:
    the chunk may be anywhere."""

    num_rows: int
    length: int
    is_fresh: bool
    num_earlier: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.length

    @property
    def num_samples(self) -> int:
        return self.num_rows + 1 + _MORE_CHOICES

    def holds(self, chunk: Slice, num_rows: int) -> bool:
        """Whether this chunk beside so many rows can be computed so."""
        fits = chunk.num_tokens <= self.length and num_rows <= self.num_rows
        has_room = num_rows + len(chunk.sampled_choices) <= self.num_samples
        is_placed = chunk.start == self.num_earlier or not (self.is_fresh or self.num_earlier)
        return fits and has_room and is_placed and chunk.scored_ids is None


class PromptPass:
    """A chunk of one prompt, and a token for each of some rows beside it: all weights are read once.

    Static input: the rows' slots and positions; of each sample the token whose logits it is drawn from, slot, position
    and choice; the chunk as `CudaStep.chunks` has it; its slot; its token ids.
    """

    def __init__(self, model: PassModel, shape: PromptShape) -> None:
        self._model = model
        self._shape = shape
        rows, samples = shape.num_rows, shape.num_samples
        self._sizes = [rows, rows, samples, samples, samples, samples, 6, 1, shape.length]
        self._layout = launches_of(model.sharing, rows, shape).pack()
        self._offsets = torch.arange(shape.length, dtype=torch.int32, device=model.device)
        nothing = Slice.of_prompt("", model.slots.padding_slot, 0, ())
        self.static_input = self.values(nothing, ()).to(model.device)

    def values(self, chunk: Slice, rows: Sequence[Slice]) -> torch.Tensor:
        """The static input for this chunk and these rows, which the shape must hold; in pinned memory."""
        shape, padding_slot = self._shape, self._model.slots.padding_slot
        count, empty = chunk.num_tokens, shape.num_rows - len(rows)
        samples = [(index, row.slot, row.start, row.choice) for index, row in enumerate(rows)]
        last, position = shape.num_rows + count - 1, chunk.start + count - 1
        samples += [(last, chunk.slot, position, chunk.choice)] * chunk.num_sampled
        samples += [(last, fork.slot, position, fork.choice) for fork in chunk.forks]
        samples += [(0, padding_slot, -1, 0)] * (shape.num_samples - len(samples))
        numbers = [row.slot for row in rows] + [padding_slot] * empty
        numbers += [row.start for row in rows] + [-1] * empty
        for column in zip(*samples, strict=True):
            numbers += column
        numbers += [shape.num_rows, count, chunk.start, 0, 0, 0, chunk.slot]
        return _pinned([*numbers, *chunk.token_ids, *[0] * (shape.length - count)])

    def run(self) -> Pass:
        parts = self.static_input.split(self._sizes)
        row_slots, row_positions, kept, slots, positions, choices, chunk, slot, ids = parts
        if self._model.drafts is None:
            row_ids = None
        else:
            row_ids, row_places = self._model.located(row_slots, row_positions)
            row_positions = row_places[self._shape.num_rows :]
            positions = self._model.located(slots, positions)[1][self._shape.num_samples :]
        prompt_positions = torch.where(self._offsets < chunk[1], self._offsets + chunk[2], -1)
        token_positions = torch.cat([row_positions, prompt_positions])
        sharing = self._model.sharing
        step = CudaStep(
            self._model.slots.block_table,
            torch.cat([row_slots, slot.expand(self._shape.length), token_positions]),
            chunk.view(2, 3).clone(),  # a compiled layer is compiled anew for a view that begins elsewhere
            sharing.share_out(row_positions) if self._shape.num_rows else self._model.no_shares,
            self._layout,
        )
        if row_ids is None:
            row_ids = self._model.slots.last_token.index_select(0, row_slots)
        input_ids = torch.cat([row_ids, ids])
        logits = self._model.logits(input_ids, token_positions, kept.long(), step)
        return Pass(logits, slots, positions, choices, None, step, PassChunk(ids, chunk[:3], slot))


def launches_of(sharing: WorkSharing, num_rows: int, shape: PromptShape | None = None) -> Launches:
    """Of so many rows of a token each, and a chunk of that shape."""
    fresh = ((num_rows, shape.length, 1),) if shape and shape.is_fresh else ()
    num_earlier = shape.num_earlier if shape else 0
    longest = shape.length if shape and not (shape.is_fresh or num_earlier) else 0
    pieces, tile_len = (sharing.most_pieces(num_rows), sharing.tile_len(num_rows)) if num_rows else (0, 0)
    return Launches(num_rows, pieces, tile_len, int(longest > 0), longest, fresh, num_earlier=num_earlier)


def _pinned(values: list[list[int]] | list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32)).pin_memory()
