"""Drafts by an EAGLE-3 head on a card: one behind the other, in captured loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from replicas.cuda.captured_loops import CapturedLoops
from replicas.cuda.card_head import CardHead
from replicas.cuda.draft_loop import row_values
from replicas.cuda.graph_passes import launches_of
from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.cuda.step import CudaStep
from replicas.kernels.draft_chain import go_on
from replicas.kv.kv_pool import KvPool
from replicas.sampling.draw import GREEDY_BELOW
from replicas.speculation.drafter import NO_DRAFT, DraftRow
from replicas.speculation.eagle3_head import Eagle3Head
from scheduler.plan import SlotInit

_ROWS = (1, 2, 4, 8, 16, 32, 64)  # that get loops of their own


class HeadLoop:
    """num_drafts tokens for each of up to num_rows rows."""

    def __init__(self, head: CardHead, num_rows: int, num_drafts: int, has_sampled: bool) -> None:
        """has_sampled: as of a DraftLoop."""
        self._head, self._num_drafts, self._has_sampled = head, num_drafts, has_sampled
        self.static_input = row_values((), num_rows, head.slots.padding_slot).to(head.device)
        self._drafts = torch.full((num_rows, num_drafts), NO_DRAFT, dtype=torch.int64, device=head.device)
        self._layout = launches_of(head.sharing, num_rows).pack()

    def run(self) -> Tensor:
        """int64 [num_rows, num_drafts], NO_DRAFT from where there is none: until the next run. Mutates the head's layer
        of the pool, behind what is known."""
        slots, wanted, choices = self.static_input
        head = self._head
        lengths, outputs = head.lengths(slots, wanted), head.outputs[slots.long()]
        for place in range(self._num_drafts):
            tokens = head.draw(outputs, slots, lengths, choices, self._has_sampled)
            fed = go_on(tokens, slots, wanted, lengths, self._drafts, place, 0)
            if place + 1 == self._num_drafts:
                break
            lengths = fed.lengths
            shares = head.sharing.share_out(fed.positions)
            step = CudaStep(head.slots.block_table, fed.places, head.no_chunks, shares, self._layout)
            outputs = head.compute(outputs, fed.ids, fed.positions, step)
        return self._drafts


class CardEagle3:
    """A Drafter, of a runner that also has its head follow each of its steps. One thread."""

    def __init__(self, head: Eagle3Head, pool: KvPool, slots: CudaSlots, max_drafts: int) -> None:
        """slots, pool: the runner's. Blocks: captures its loops."""
        self.head = CardHead(head, pool, slots)
        num_slots = slots.padding_slot
        self._is_sampled = [False] * num_slots
        self._begun: set[int] = set()  # slots that the device has not been told of
        self._loops = CapturedLoops(_ROWS, num_slots, max_drafts)
        self._loops.capture(partial(HeadLoop, self.head), torch.cuda.graph_pool_handle(), "head")

    def start(self, init: SlotInit) -> None:
        self._begun.add(init.slot)
        self._is_sampled[init.slot] = init.sampling.temperature >= GREEDY_BELOW

    def accepted(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """The runner has the head follow."""

    def tell(self) -> None:
        """The device, of slots that were begun: once it has their parameters. Mutates. Does not wait."""
        if self._begun:
            self.head.begin(numbers_to_device(sorted(self._begun), self.head.device))
            self._begun.clear()

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> Tensor:
        """As the contract has it. Does not wait. Good until the next call."""
        self.tell()
        size = self._loops.size_of(len(rows))
        most = max(row.num_drafts for row in rows)
        values = row_values(rows, size, self.head.slots.padding_slot).pin_memory()
        has_sampled = any(self._is_sampled[row.slot] for row in rows)
        return self._loops.draft(size, most, has_sampled, values)[: len(rows)]
