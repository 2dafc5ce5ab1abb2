"""The head's layer for what a pass of the served model has computed, once its tokens are chosen: captured, or by hand.

Where the pass's tokens lie and what they attend over is the pass's own: the head has a layer of the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replicas.cuda.card_head import CardHead
from replicas.cuda.graph_passes import Pass, PassChunk
from replicas.cuda.layer_taps import LayerTaps
from replicas.cuda.slots import numbers_to_device
from replicas.cuda.step import ChunkLayout, CudaInputs, CudaStep
from replicas.device_copy import to_device
from replicas.kernels.row_feed import FedRows
from scheduler.plan import Slice, StepPlan


class FollowedStates:
    """What layers of the model were given in its last pass, as the head takes it: [n, hidden size], in memory that all
    captured passes share."""

    def __init__(self, head: CardHead, taps: LayerTaps, most_tokens: int) -> None:
        """most_tokens: of a captured pass."""
        self._head, self._taps = head, taps
        self._kept = torch.zeros(most_tokens, head.outputs.shape[1], dtype=head.outputs.dtype, device=head.device)
        self._last = self._kept[:0]

    def take(self, *_: object) -> None:
        """Behind a pass of the model: a hook of it. Mutates."""
        hidden = self._head.fused(self._taps.take())
        if len(hidden) <= len(self._kept):
            self._last = self._kept[: len(hidden)]
            self._last.copy_(hidden)
        else:
            self._last = hidden

    def of(self, num_tokens: int) -> Tensor:
        """Of the last pass, of so many tokens."""
        return self._kept[:num_tokens] if num_tokens <= len(self._kept) else self._last


class FollowPass:
    """Behind one captured pass. static_input: what was drawn of its rows of logits, int64. counts: int32 [R, 2], as
    accepted of its rows with drafts. next_id: int64 [1], of its chunk: the prompt's token behind it, -1: it was drawn.
    """

    def __init__(self, head: CardHead, states: FollowedStates, given: Pass) -> None:
        self._head, self._states, self._given = head, states, given
        device = head.device
        self.static_input = torch.zeros(len(given.slots), dtype=torch.int64, device=device)
        num_rows = 0 if given.fed is None else len(given.fed.rows)
        self.counts = torch.ones(num_rows, 2, dtype=torch.int32, device=device)
        self.next_id = torch.full((1,), -1, dtype=torch.int64, device=device)

    def run(self) -> None:
        head, given, tokens = self._head, self._given, self.static_input.clamp(min=0)
        step = given.step
        assert step is not None
        positions = step.positions
        if given.chunk is not None:
            self._run_prompt(given.chunk, step, positions, tokens)
            return
        output = head.compute(self._states.of(len(positions)), tokens, positions, step)
        if given.fed is None:
            head.keep(given.slots, output, given.positions + 1)
        else:
            _keep_rows(head, given.fed, self.counts[:, 0], output)

    def _run_prompt(self, chunk: PassChunk, step: CudaStep, positions: Tensor, tokens: Tensor) -> None:
        head, num_rows = self._head, len(positions) - len(chunk.ids)
        count, start = chunk.span[1].long(), chunk.span[2].long()
        drawn = tokens.index_select(0, (positions[:num_rows] >= 0).sum()[None])  # the chunk's, behind the rows'
        end = torch.where(self.next_id >= 0, self.next_id, drawn)
        numbers = torch.arange(len(chunk.ids), device=tokens.device)
        behind = torch.where(numbers == count - 1, end, chunk.ids.roll(-1).long())
        output = head.compute(self._states.of(len(positions)), torch.cat([tokens[:num_rows], behind]), positions, step)
        if num_rows:
            head.keep(step.token_slots[:num_rows], output[:num_rows], positions[:num_rows] + 1)
        last = (num_rows + count - 1).clamp(min=0)[None]
        head.keep(chunk.slot, output.index_select(0, last), (start + count)[None])


def follow_by_hand(
    head: CardHead, hidden: Tensor, plan: StepPlan, inputs: CudaInputs, fed: FedRows | None, tokens: Tensor,
    accepted: Tensor | None, has_fresh: bool, next_ids: Sequence[int],
) -> None:  # fmt: skip
    """Behind a pass that was launched by hand: hidden: of its tokens. tokens: of all places of the plan, accepted: of
    its rows with drafts, else each has one. next_ids: of each chunk the prompt's token behind it, -1: it was drawn.
    Mutates the pool and the head. Does not wait."""
    tokens, step = tokens.clamp(min=0), inputs.step
    num_row_tokens = 0 if fed is None else len(fed.ids)
    chunks = plan.chunks
    behind, places, samples = _behind_chunks(
        chunks, num_row_tokens, sum(r.num_sampled for r in plan.rows), has_fresh, next_ids
    )
    all_ids = torch.cat([tokens[:num_row_tokens], to_device(torch.from_numpy(behind), head.device)])
    drawn = [(place, sample) for place, sample in zip(places, samples, strict=True) if sample >= 0]
    if drawn:
        at, of = numbers_to_device([[place for place, _ in drawn], [sample for _, sample in drawn]], head.device)
        all_ids.index_copy_(0, at, tokens[of])
    output = head.compute(hidden, all_ids, step.positions, step)
    if fed is not None:
        counts = torch.ones_like(fed.firsts) if accepted is None else accepted[:, 0]
        _keep_rows(head, fed, counts, output)
    if chunks:
        at, slots, ends = numbers_to_device(
            [places, [chunk.slot for chunk in chunks], [chunk.end for chunk in chunks]], head.device
        )
        head.keep(slots, output[at], ends)


def _keep_rows(head: CardHead, fed: FedRows, counts: Tensor, output: Tensor) -> None:
    """counts: of each row how many of its tokens count."""
    slots, firsts, reals, positions = fed.rows.unbind(1)
    counts = torch.where(reals > 0, counts, 1)
    head.keep(slots, output[(firsts + counts - 1).long()], positions + counts)


def _behind_chunks(
    chunks: Sequence[Slice], first: int, first_sample: int, has_fresh: bool, next_ids: Sequence[int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Of the chunks' tokens, in the order in which they lie, the token behind each; of each chunk the place of its last
    one among all of the step's tokens, and the sample that stands behind that, -1: none. first: their first place."""
    layout = ChunkLayout.of(chunks, first, has_fresh)
    behind, places = [], [0] * len(chunks)
    for number, start, end in layout.parts:
        ids = chunks[number].token_ids
        of_part = (*ids[start + 1 : end + 1], *([max(0, next_ids[number])] if end == len(ids) else ()))
        behind.append(np.fromiter(of_part, np.int64, end - start))
        first += end - start
        places[number] = first - 1
    samples, sample = [], first_sample
    for chunk, next_id in zip(chunks, next_ids, strict=True):
        samples.append(sample if chunk.num_sampled and next_id < 0 else -1)
        sample += chunk.num_sampled + len(chunk.forks)
    return (np.concatenate(behind) if behind else np.empty(0, np.int64)), places, samples
