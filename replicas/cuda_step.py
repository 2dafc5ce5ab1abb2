"""A plan as the CUDA attention reads it: what lies on the device, and what the host decides about launches.

No triton here. Tokens of a step lie as in `replicas.step_inputs`: decode rows, then chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from replicas.cuda_slots import CudaSlots, numbers_to_device
from scheduler.plan import PrefillChunk, StepPlan

if TYPE_CHECKING:
    from replicas.kernels.paged_decode import WorkSharing

# A library kernel computes this much of a fresh prompt, in whole multiples: cuDNN prepares each new length for
# milliseconds, so there must be few. The rest of the prompt is a chunk over the pool.
_FRESH_MULTIPLE = 256
_MIN_FRESH = 512


class CudaStep(NamedTuple):
    """What every layer's attention is given; tensors only, so that a compiled layer takes it as it is.

    block_table: int64 [num_slots + 1, max_blocks]. token_slots, positions: int32 [num_tokens], position -1: padding.
    chunks: int32 [n >= 2, 3], the chunks over the pool: first token, length, position. shares: int32 [n, 4], which
    programs attend over which keys of the rows. layout: int64 on the host, as `Launches` packs it.
    """

    block_table: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    chunks: torch.Tensor
    shares: torch.Tensor
    layout: torch.Tensor


@dataclass(frozen=True, slots=True)
class Launches:
    """What the host launches for a step. fresh: (first token, length, count) of prompts of one length side by side."""

    num_rows: int
    num_pieces: int
    num_chunks: int
    longest_chunk: int
    fresh: tuple[tuple[int, int, int], ...]

    def pack(self) -> torch.Tensor:
        head = [self.num_rows, self.num_pieces, self.num_chunks, self.longest_chunk]
        return torch.tensor(head + [number for run in self.fresh for number in run], dtype=torch.int64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Launches:
        num_rows, num_pieces, num_chunks, longest, *rest = packed.tolist()
        fresh = tuple((rest[i], rest[i + 1], rest[i + 2]) for i in range(0, len(rest), 3))
        return cls(num_rows, num_pieces, num_chunks, longest, fresh)


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


def build_cuda_inputs(plan: StepPlan, slots: CudaSlots, sharing: WorkSharing, has_fresh: bool) -> CudaInputs:
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
    runs = tuple((run[0], run[1], run[2]) for run in fresh)
    longest = max((p[1] for p in paged), default=0)
    launches = Launches(num_rows, sharing.most_pieces(num_rows), len(paged), longest, runs)
    places = numbers_to_device([token_slots, positions], device)
    places32 = places.int()
    chunk_rows = paged + [[0, 0, 0]] * max(0, 2 - len(paged))
    input_ids = numbers_to_device(ids, device)
    if num_rows:
        input_ids = torch.cat([slots.last_token[places[0, :num_rows]], input_ids])
    step = CudaStep(
        slots.block_table,
        places32[0],
        places32[1],
        numbers_to_device(chunk_rows, device).int(),
        sharing.share_out(places32[1, :num_rows]),
        launches.pack(),
    )
    return CudaInputs(input_ids, numbers_to_device(logit_rows, device), step)
