"""A plan turned into tensors: what one forward pass over the paged pool reads.

Tokens of a step lie flat in one row [num_tokens], slice after slice. Nothing here depends on the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from replicas.sampling.slot_state import SlotState
from scheduler.plan import Slice, StepPlan

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of a token each, of similar context length, so that padding to the longest costs less than twice the work.

    rows: indices into the flat tokens, a slice where they are adjacent, else int64 [n].
    block_table: int64 [n, num_blocks].
    mask: bool [n, 1, 1, num_blocks * block_size], true where a key is visible.
    """

    rows: torch.Tensor | slice
    block_table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Any other slice, a chunk of a prompt or a row with guesses, by itself: flat tokens [start, start + length), keys
    0 .. position + length of its sequence.

    block_ids: int64 [num_blocks], covering the context up to the slice's end.
    mask: bool [length, num_blocks * block_size], causal.
    """

    start: int
    length: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """input_ids, positions, write_blocks, write_offsets: int64 [num_tokens]. logit_rows: int64 [num_samples].

    fresh_blocks: int64 [n], blocks whose first token this step writes by a row of one token. tails: (block, offset) per
    span that ends within a block. What lies there is another request's and may be no number, which no mask keeps
    out of a sum: the runner clears both first.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    fresh_blocks: torch.Tensor
    tails: tuple[tuple[int, int], ...]
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkSpan, ...]
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _FlatSlices:
    """Where a plan's slices lie. slots, starts, counts, ends: int64 [n], ends: of their flat tokens.

    single: indices of the rows of a token each; spans: of the others.
    """

    slices: tuple[Slice, ...]
    slots: Numbers
    starts: Numbers
    counts: Numbers
    ends: Numbers
    single: Numbers
    spans: list[int]

    @classmethod
    def of(cls, plan: StepPlan) -> _FlatSlices:
        slices, num_rows = plan.slices, plan.num_rows
        slots = np.array([part.slot for part in slices], dtype=np.int64)
        starts = np.array([part.start for part in slices], dtype=np.int64)
        counts = np.array([part.num_tokens for part in slices], dtype=np.int64)
        is_single = counts == 1
        is_single[num_rows:] = False
        spans: list[int] = (~is_single).nonzero()[0].tolist()
        return cls(slices, slots, starts, counts, counts.cumsum(), is_single.nonzero()[0], spans)

    def slots_and_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, int64 [num_tokens]."""
        if not self.spans:
            return torch.from_numpy(self.slots), torch.from_numpy(self.starts)
        positions = np.arange(self.ends[-1]) + (self.starts + self.counts - self.ends).repeat(self.counts)
        return torch.from_numpy(self.slots.repeat(self.counts)), torch.from_numpy(positions)

    def logit_rows(self) -> torch.Tensor:
        """The flat token behind which each sampled one stands."""
        if not self.spans:
            return torch.arange(len(self.slices))
        last = (self.ends - 1).tolist()
        rows: list[int] = []
        done = 0
        for index in self.spans:
            part, end = self.slices[index], last[index] + 1
            rows += last[done:index]  # a token each
            rows += [*range(end - part.num_sampled, end), *[end - 1] * len(part.forks)]
            done = index + 1
        return torch.tensor(rows + last[done:], dtype=torch.int64)


def build_step_inputs(plan: StepPlan, slots: SlotState, block_size: int) -> StepInputs:
    """Tensors of one plan, after `slots.apply(plan)`. Pure: mutates nothing.

    Raises ValueError for a slice that needs more of its slot's tokens than the last one.
    """
    flat = _FlatSlices.of(plan)
    token_slots, positions = flat.slots_and_positions()
    write_blocks = slots.block_table[token_slots, positions // block_size]
    write_offsets = positions % block_size
    single = _index(flat.ends[flat.single] - 1)
    spans = tuple([_span(plan.slices[index], int(flat.ends[index]), slots, block_size) for index in flat.spans])
    ends = [span.start + span.length - 1 for span in spans]
    return StepInputs(
        input_ids=_input_ids(flat, slots.last_token[token_slots]),
        positions=positions,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        fresh_blocks=write_blocks[single][write_offsets[single] == 0],
        tails=tuple((int(write_blocks[end]), int(write_offsets[end]) + 1) for end in ends),
        groups=_decode_groups(flat, slots, block_size),
        chunks=spans,
        logit_rows=flat.logit_rows(),
    )


def _input_ids(flat: _FlatSlices, last_tokens: torch.Tensor) -> torch.Tensor:
    """last_tokens: of each token's slot. Mutates them: what the slices know goes in their place."""
    for index in flat.spans:
        part, end = flat.slices[index], int(flat.ends[index])
        num_known = len(part.token_ids)
        if part.num_tokens > num_known + 1:
            raise ValueError(f"{part.request_id}: {part.num_tokens} tokens, {num_known} known, but slots keep only one")
        last_tokens[end - num_known : end] = torch.tensor(part.token_ids, dtype=torch.int64)
    return last_tokens


def _span(part: Slice, end: int, slots: SlotState, block_size: int) -> ChunkSpan:
    num_blocks = -(-part.end // block_size)
    keys = torch.arange(num_blocks * block_size)
    queries = torch.arange(part.start, part.end)
    block_ids = slots.block_table[part.slot, :num_blocks]
    return ChunkSpan(end - part.num_tokens, part.num_tokens, block_ids, keys[None, :] <= queries[:, None])


def _decode_groups(flat: _FlatSlices, slots: SlotState, block_size: int) -> tuple[DecodeGroup, ...]:
    if not len(flat.single):
        return ()
    last_blocks = flat.starts[flat.single] // block_size
    sizes = np.frexp(last_blocks + 1)[1]  # bits of the number of blocks
    groups = []
    for size in dict.fromkeys(sizes.tolist()):
        among = sizes == size
        members = flat.single[among]
        last, last_block = torch.from_numpy(flat.starts[members]), torch.from_numpy(last_blocks[among])
        num_blocks = int(last_block.max()) + 1
        table = slots.block_table[torch.from_numpy(flat.slots[members]), :num_blocks]
        # Beyond a row's own blocks its table is stale. It gets its first block again: masked, but surely numbers.
        is_own = torch.arange(num_blocks)[None, :] <= last_block[:, None]
        table = torch.where(is_own, table, table[:, :1])
        keys = torch.arange(num_blocks * block_size)
        mask = (keys[None, :] <= last[:, None])[:, None, None, :]
        groups.append(DecodeGroup(_index(flat.ends[members] - 1), table, mask))
    return tuple(groups)


def _index(rows: Numbers) -> torch.Tensor | slice:
    """Ascending row numbers as an index; a slice copies nothing."""
    if not len(rows) or rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
    return torch.from_numpy(rows)
