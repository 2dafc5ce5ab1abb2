"""A plan as the CUDA attention reads it: what lies on the device, and what the host decides about launches.

No triton here. Tokens of a step lie as in `replicas.step_inputs`: decode rows, then chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from replicas.cuda_slots import CudaSlots, numbers_to_device
from scheduler.plan import PrefillChunk, StepPlan

# A library kernel computes this much of a fresh prompt, in whole multiples: cuDNN prepares each new length for
# milliseconds, so there must be few. The rest of the prompt is a chunk over the pool.
_FRESH_MULTIPLE = 256
_MIN_FRESH = 512
_BLOCK_N = 64  # keys that a decode program takes at once: a split is no smaller
_MAX_SPLITS = 64
# Contexts up to this are not split for their length.
_SHORT_CONTEXT = 2048
_TOKENS_A_SPLIT = 1024


class CudaStep(NamedTuple):
    """What every layer's attention is given; tensors only, so that a compiled layer takes it as it is.

    block_table: int64 [num_slots + 1, max_blocks]. token_slots, positions: int32 [num_tokens], position -1: padding.
    chunks: int32 [n >= 2, 3], the chunks over the pool: first token, length, position. layout: int64 on the host,
    as `Launches` packs it.
    """

    block_table: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    chunks: torch.Tensor
    layout: torch.Tensor


@dataclass(frozen=True, slots=True)
class Launches:
    """What the host launches for a step. fresh: (first token, length, count) of prompts of one length side by side."""

    num_rows: int
    num_splits: int
    min_split: int
    num_chunks: int
    longest_chunk: int
    fresh: tuple[tuple[int, int, int], ...]

    def pack(self) -> torch.Tensor:
        head = [self.num_rows, self.num_splits, self.min_split, self.num_chunks, self.longest_chunk]
        return torch.tensor(head + [number for run in self.fresh for number in run], dtype=torch.int64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Launches:
        num_rows, num_splits, min_split, num_chunks, longest, *rest = packed.tolist()
        fresh = tuple((rest[i], rest[i + 1], rest[i + 2]) for i in range(0, len(rest), 3))
        return cls(num_rows, num_splits, min_split, num_chunks, longest, fresh)


def split_contexts(num_rows: int, num_kv_heads: int, longest: int, num_processors: int) -> tuple[int, int]:
    """(number of splits, fewest tokens of one) for decode rows whose longest context is `longest`.

    Few rows are split until every processor has work; long contexts so that one of them does not hold up the rest.
    """
    for_processors = -(-4 * num_processors // (num_rows * num_kv_heads))
    for_length = -(-longest // _TOKENS_A_SPLIT) if longest > _SHORT_CONTEXT else 1
    num_splits = max(for_processors if for_processors > 2 else 1, for_length)
    num_splits = max(1, min(num_splits, -(-longest // _BLOCK_N), _MAX_SPLITS))
    return num_splits, _BLOCK_N if num_splits > for_length else 4 * _BLOCK_N


def split_chunks(
    chunks: Sequence[PrefillChunk], first: int, has_fresh: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """(runs of fresh prompts [first token, length, count], chunks over the pool [first token, length, position]).

    first: the first chunk's token. has_fresh: whether a library kernel may compute the heads of fresh prompts.
    """
    fresh: list[list[int]] = []
    paged: list[list[int]] = []
    for chunk in chunks:
        length = len(chunk.token_ids)
        head = length // _FRESH_MULTIPLE * _FRESH_MULTIPLE if has_fresh and chunk.start == 0 else 0
        if head < _MIN_FRESH:
            head = 0
        if head and fresh and fresh[-1][1] == head and fresh[-1][0] + fresh[-1][1] * fresh[-1][2] == first:
            fresh[-1][2] += 1
        elif head:
            fresh.append([first, head, 1])
        if head < length:
            paged.append([first + head, length - head, chunk.start + head])
        first += length
    return fresh, paged


@dataclass(frozen=True, slots=True)
class CudaInputs:
    """input_ids: int64 [num_tokens]; logit_rows: int64 [num_samples]."""

    input_ids: torch.Tensor
    logit_rows: torch.Tensor
    step: CudaStep


def build_cuda_inputs(
    plan: StepPlan, slots: CudaSlots, num_kv_heads: int, num_processors: int, has_fresh: bool
) -> CudaInputs:
    """Device tensors of one plan, after `slots.apply(plan)`. Does not wait for the device."""
    device = slots.state.device
    num_rows = len(plan.rows)
    token_slots = [row.slot for row in plan.rows]
    positions = [row.position for row in plan.rows]
    ids: list[int] = []
    logit_rows = list(range(num_rows))
    for chunk in plan.chunks:
        ids += chunk.token_ids
        token_slots += [chunk.slot] * len(chunk.token_ids)
        positions += range(chunk.start, chunk.start + len(chunk.token_ids))
        logit_rows += [num_rows + len(ids) - 1] * len(chunk.targets)
    fresh, paged = split_chunks(plan.chunks, num_rows, has_fresh)
    longest_context = max(positions[:num_rows], default=0) + 1
    num_splits, min_split = split_contexts(max(num_rows, 1), num_kv_heads, longest_context, num_processors)
    launches = Launches(
        num_rows, num_splits, min_split, len(paged), max((p[1] for p in paged), default=0),
        tuple((run[0], run[1], run[2]) for run in fresh),
    )  # fmt: skip
    places = numbers_to_device([token_slots, positions], device)
    places32 = places.int()
    chunk_rows = paged + [[0, 0, 0]] * max(0, 2 - len(paged))
    input_ids = numbers_to_device(ids, device)
    if num_rows:
        input_ids = torch.cat([slots.last_token[places[0, :num_rows]], input_ids])
    step = CudaStep(
        slots.block_table, places32[0], places32[1], numbers_to_device(chunk_rows, device).int(), launches.pack()
    )
    return CudaInputs(input_ids, numbers_to_device(logit_rows, device), step)
