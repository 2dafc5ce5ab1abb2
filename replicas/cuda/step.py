"""A plan as the CUDA attention reads it: what lies on the device, and what the host decides about launches.

No triton here. Tokens of a step lie flat in one row [num_tokens]: first those of the decode rows, one each or with
drafts behind it, then those of the chunks, in the order of a ChunkLayout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.device_copy import to_device
from scheduler.plan import Slice, StepPlan

if TYPE_CHECKING:
    from replicas.kernels.row_feed import FedRows
    from replicas.kernels.work_sharing import WorkSharing

# A library kernel computes the head of a long fresh prompt: this many tokens, or half as many more, doubled and doubled
# again. There must be few lengths, as cuDNN prepares each, and each number of prompts, for longer than a step. The rest
# of the prompt, and shorter ones, are chunks over the pool: all in one launch, where the host would be late with more.
_MIN_FRESH = 2048
_FRESH_COUNTS = (8, 4, 2, 1)  # so many prompts in one launch


class CudaStep(NamedTuple):
    """What every layer's attention is given; tensors only, so that a compiled layer takes it as it is.

    block_table: int64 [num_slots + 1, max_blocks]. places: int32 [2 * num_tokens], the tokens' slots, then their
    positions, -1 for padding: one tensor, since a compiled layer is compiled anew for a view that begins elsewhere.
    chunks: int32 [n >= 2, 3], the chunks over the pool: first token, length, position. shares: int32 [n, 4], which
    programs attend over which keys of the rows, and what rows with drafts are; attention counts in it, a layer behind
    the other. layout: int64 on the host, as `Launches` packs it.
    """

    block_table: torch.Tensor
    places: torch.Tensor
    chunks: torch.Tensor
    shares: torch.Tensor
    layout: torch.Tensor

    @property
    def token_slots(self) -> torch.Tensor:
        """int32 [num_tokens]."""
        return self.places.chunk(2)[0]

    @property
    def positions(self) -> torch.Tensor:
        """int32 [num_tokens]."""
        return self.places.chunk(2)[1]


@dataclass(frozen=True, slots=True)
class Launches:
    """What the host launches for a step. num_pieces, tile_len: of the rows' contexts, as a WorkSharing cuts them.

    fresh: (first token, length, count) of prompts of one length side by side. Where rows may have drafts: num_queries
    in all, at most most_queries in one, and the line of `shares` from which on it stands which; else all three are 0.
    num_earlier: in front of the step's only chunk, which then is none of num_chunks: `attend_behind`; else 0.
    """

    num_rows: int
    num_pieces: int
    tile_len: int
    num_chunks: int
    longest_chunk: int
    fresh: tuple[tuple[int, int, int], ...]
    num_queries: int = 0
    most_queries: int = 0
    rows_at: int = 0
    num_earlier: int = 0

    @property
    def num_row_tokens(self) -> int:
        """Of the step's tokens the first ones, which are of rows."""
        return self.num_queries or self.num_rows

    def pack(self) -> torch.Tensor:
        head = [self.num_rows, self.num_pieces, self.tile_len, self.num_chunks, self.longest_chunk]
        more = [self.num_queries, self.most_queries, self.rows_at, self.num_earlier, len(self.fresh)]
        return torch.tensor([*head, *more, *(number for run in self.fresh for number in run)], dtype=torch.int64)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Launches:
        num_rows, num_pieces, tile_len, num_chunks, longest, *more = packed.tolist()
        queries, most, rows_at, earlier, count, *rest = more
        fresh = tuple((rest[i], rest[i + 1], rest[i + 2]) for i in range(0, 3 * count, 3))
        return cls(num_rows, num_pieces, tile_len, num_chunks, longest, fresh, queries, most, rows_at, earlier)


class ChunkPart(NamedTuple):
    """Tokens [start, end) of chunk number `number` of a plan."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """In which order a step's prompt tokens lie, and what computes which of them.

    fresh: runs of prompts' heads [first token, length, count]. paged: chunks over the pool [first token, length,
    position].
    """

    parts: tuple[ChunkPart, ...]
    fresh: tuple[tuple[int, int, int], ...]
    paged: list[list[int]]

    @classmethod
    def of(cls, chunks: Sequence[Slice], first: int, has_fresh: bool) -> ChunkLayout:
        """first: the first prompt token's place. has_fresh: whether a library kernel may compute fresh prompts' heads.

        Heads of one length lie side by side, so that one launch computes some: 1, 2, 4 or 8, as the library
        prepares each number of them anew. A step whose prompts are scored keeps its plan's order.
        """
        heads: defaultdict[int, list[ChunkPart]] = defaultdict(list)
        tails: list[ChunkPart] = []
        is_scored = any(chunk.scored_ids is not None for chunk in chunks)
        for number, chunk in enumerate(chunks):
            length = chunk.num_tokens
            head = 0 if chunk.start > 0 or not has_fresh or is_scored else _head_of(length)
            if head:
                heads[head].append(ChunkPart(number, 0, head))
            if head < length:
                tails.append(ChunkPart(number, head, length))
        fresh: list[tuple[int, int, int]] = []
        for length in sorted(heads):
            left = len(heads[length])
            while left:
                count = next(count for count in _FRESH_COUNTS if count <= left)
                fresh.append((first, length, count))
                first += length * count
                left -= count
        paged = []
        for tail in tails:
            paged.append([first, tail.end - tail.start, chunks[tail.number].start + tail.start])
            first += tail.end - tail.start
        parts = [part for length in sorted(heads) for part in heads[length]]
        return cls((*parts, *tails), tuple(fresh), paged)


def _head_lengths(most_tokens: int) -> list[int]:
    """Lengths of heads in steps of so many tokens, ascending."""
    doubled = [_MIN_FRESH << number for number in range(max(0, (most_tokens // _MIN_FRESH).bit_length()))]
    return sorted(n for length in doubled for n in (length, length * 3 // 2) if n <= most_tokens)


def _head_of(length: int) -> int:
    """How many of a fresh prompt's tokens the library computes."""
    return max(_head_lengths(length), default=0)


def fresh_runs(most_tokens: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Every (length, count) that `ChunkLayout.fresh` may have in steps of so many tokens. longest: of prompts."""
    lengths = _head_lengths(min(most_tokens, longest))
    return tuple((n, count) for n in lengths for count in _FRESH_COUNTS if n * count <= most_tokens)


@dataclass(frozen=True, slots=True)
class CudaInputs:
    """input_ids: int64 [num_tokens]; logit_rows: int64 [num_samples]."""

    input_ids: torch.Tensor
    logit_rows: torch.Tensor
    step: CudaStep


def build_cuda_inputs(
    plan: StepPlan, slots: CudaSlots, sharing: WorkSharing, has_fresh: bool, fed: FedRows | None = None
) -> CudaInputs:
    """Device tensors of one plan, after `slots.apply(plan)`. Does not wait for the device.

    fed: the plan's rows where they may have drafts; None: they are a token each, where their slots are by now.
    """
    if fed is not None:
        return _behind(fed, build_cuda_inputs(replace(plan, slices=plan.chunks), slots, sharing, has_fresh), sharing)
    device = slots.state.device
    chunks, num_rows = plan.chunks, plan.num_rows
    layout = ChunkLayout.of(chunks, num_rows, has_fresh)
    num_tokens = num_rows + plan.num_prefill_tokens
    # Filled a part at a time: lists of all tokens would take milliseconds, for which the device waits.
    places = torch.empty(2, num_tokens, dtype=torch.int32)
    rows = np.array([(row.slot, row.start) for row in plan.rows], dtype=np.int32).reshape(-1, 2)
    places[:, :num_rows] = torch.from_numpy(rows.T)
    ids = torch.empty(num_tokens - num_rows, dtype=torch.int64)
    ends = [0] * len(chunks)  # behind each chunk's last token
    first = num_rows
    for number, start, end in layout.parts:
        chunk, behind = chunks[number], first + end - start
        part = np.fromiter(chunk.token_ids[start:end], np.int64, end - start)  # torch.tensor takes six times as long
        ids[first - num_rows : behind - num_rows] = torch.from_numpy(part)
        places[0, first:behind] = chunk.slot
        torch.arange(chunk.start + start, chunk.start + end, out=places[1, first:behind])
        ends[number] = first = behind
    logit_rows = list(range(num_rows))
    for chunk, behind in zip(chunks, ends, strict=True):
        logit_rows += [behind - 1] * len(chunk.sampled_choices)
    paged = layout.paged
    longest = max((p[1] for p in paged), default=0)
    launches = Launches(
        num_rows, sharing.most_pieces(num_rows), sharing.tile_len(num_rows), len(paged), longest, layout.fresh
    )
    chunk_rows = paged + [[0, 0, 0]] * max(0, 2 - len(paged))
    on_device = to_device(places.flatten(), device)
    input_ids = to_device(ids, device)
    if num_rows:
        row_slots = on_device[:num_rows].long()
        input_ids = torch.cat([slots.last_token[row_slots], input_ids])
        if slots.history is not None:  # steps in flight may move them
            planned, length = on_device[num_tokens : num_tokens + num_rows], slots.length[row_slots].int()
            planned.copy_(torch.where(length >= 0, length, planned))
    step = CudaStep(
        slots.block_table,
        on_device,
        numbers_to_device(chunk_rows, device).int(),
        sharing.share_out(on_device[num_tokens : num_tokens + num_rows]),
        launches.pack(),
    )
    return CudaInputs(input_ids, numbers_to_device(logit_rows, device), step)


def _behind(fed: FedRows, of_chunks: CudaInputs, sharing: WorkSharing) -> CudaInputs:
    """Rows, and the step's chunks behind them."""
    num_tokens, num_rows, step = len(fed.ids), len(fed.rows), of_chunks.step
    launches = Launches.unpack(step.layout)
    launches = replace(
        launches,
        num_rows=num_rows,
        num_pieces=sharing.most_pieces(num_rows),
        tile_len=sharing.tile_len(num_rows),
        fresh=tuple((first + num_tokens, length, count) for first, length, count in launches.fresh),
        num_queries=num_tokens,
        most_queries=fed.most,
        rows_at=sharing.rows_at,
    )
    rows = torch.arange(num_tokens, device=fed.ids.device)
    return CudaInputs(
        torch.cat([fed.ids, of_chunks.input_ids]),
        torch.cat([rows, of_chunks.logit_rows + num_tokens]),
        CudaStep(
            step.block_table,
            torch.cat([fed.slots, step.token_slots, fed.positions, step.positions]),
            torch.cat([step.chunks[:, :1] + num_tokens, step.chunks[:, 1:]], 1),
            fed.shares,
            launches.pack(),
        ),
    )
