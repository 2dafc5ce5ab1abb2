"""A plan turned into tensors: what one forward pass over the paged pool reads.

Tokens of a step lie flat in one row [num_tokens]: first one per decode row, then the prefill chunks one
after another. Nothing here depends on the model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from replicas.sampling.slot_state import SlotState
from scheduler.plan import DecodeRow, PrefillChunk, StepPlan


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context length, so that padding to the longest costs less than twice the work.

    rows: indices into the flat tokens, a slice where they are adjacent, else int64 [n].
    block_table: int64 [n, num_blocks].
    mask: bool [n, 1, 1, num_blocks * block_size], true where a key is visible.
    """

    rows: torch.Tensor | slice
    block_table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One prefill chunk: flat tokens [start, start + length), keys 0 .. position + length of its sequence.

    block_ids: int64 [num_blocks], covering the context up to the chunk's end.
    mask: bool [length, num_blocks * block_size], causal.
    """

    start: int
    length: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """input_ids, positions, write_blocks, write_offsets: int64 [num_tokens]. logit_rows: int64 [num_samples].

    fresh_blocks: int64 [n], blocks whose first token this step writes by a decode row. tails: (block, offset) per
    chunk that ends within a block. What lies there is another request's and may be no number, which no mask keeps
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


def build_step_inputs(plan: StepPlan, slots: SlotState, block_size: int) -> StepInputs:
    """Tensors of one plan, after `slots.apply(plan)`. Pure: mutates nothing."""
    row_slots = torch.tensor([row.slot for row in plan.rows], dtype=torch.int64)
    ids = [slots.last_token[row_slots]]
    positions = [torch.tensor([row.position for row in plan.rows], dtype=torch.int64)]
    token_slots = [row_slots]
    logit_rows = list(range(len(plan.rows)))
    spans = []
    start = len(plan.rows)
    for chunk in plan.chunks:
        length = len(chunk.token_ids)
        ids.append(torch.tensor(chunk.token_ids, dtype=torch.int64))
        positions.append(torch.arange(chunk.start, chunk.start + length))
        token_slots.append(torch.full((length,), chunk.slot, dtype=torch.int64))
        spans.append(_chunk_span(chunk, start, slots, block_size))
        start += length
        logit_rows += [start - 1] * len(chunk.targets)
    flat_positions = torch.cat(positions)
    write_blocks = slots.block_table[torch.cat(token_slots), flat_positions // block_size]
    write_offsets = flat_positions % block_size
    num_rows = len(plan.rows)
    ends = [span.start + span.length - 1 for span in spans]
    return StepInputs(
        input_ids=torch.cat(ids),
        positions=flat_positions,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        fresh_blocks=write_blocks[:num_rows][write_offsets[:num_rows] == 0],
        tails=tuple((int(write_blocks[end]), int(write_offsets[end]) + 1) for end in ends),
        groups=_decode_groups(plan.rows, slots, block_size),
        chunks=tuple(spans),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )


def _chunk_span(chunk: PrefillChunk, start: int, slots: SlotState, block_size: int) -> ChunkSpan:
    length = len(chunk.token_ids)
    num_blocks = -(-(chunk.start + length) // block_size)
    keys = torch.arange(num_blocks * block_size)
    queries = torch.arange(chunk.start, chunk.start + length)
    return ChunkSpan(start, length, slots.block_table[chunk.slot, :num_blocks], keys[None, :] <= queries[:, None])


def _decode_groups(rows: tuple[DecodeRow, ...], slots: SlotState, block_size: int) -> tuple[DecodeGroup, ...]:
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        num_blocks = row.position // block_size + 1
        by_size[num_blocks.bit_length()].append(index)
    groups = []
    for indices in by_size.values():
        last = torch.tensor([rows[index].position for index in indices], dtype=torch.int64)
        num_blocks = int(last.max()) // block_size + 1
        table = slots.block_table[torch.tensor([rows[index].slot for index in indices]), :num_blocks]
        # Beyond a row's own blocks its table is stale. It gets its first block again: masked, but surely numbers.
        is_own = torch.arange(num_blocks)[None, :] <= (last // block_size)[:, None]
        table = torch.where(is_own, table, table[:, :1])
        keys = torch.arange(num_blocks * block_size)
        mask = (keys[None, :] <= last[:, None])[:, None, None, :]
        groups.append(DecodeGroup(_index(indices), table, mask))
    return tuple(groups)


def _index(indices: list[int]) -> torch.Tensor | slice:
    """Ascending row numbers as an index; a slice copies nothing."""
    if indices[-1] - indices[0] + 1 == len(indices):
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, dtype=torch.int64)
