"""A draft model's passes on a card, captured: those that read on, and those that draft one token behind the other.

All that differs from step to step lies in a small int32 tensor: slots, drafts wanted, choices. What the model has to
read, where its rows are, and what each pass feeds, is found on the device: between a step's choice and the next step's
drafts nothing comes to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from replicas.cuda.graph_passes import PassModel, launches_of
from replicas.cuda.slots import CudaSlots
from replicas.cuda.step import CudaStep
from replicas.kernels.draft_chain import go_on
from replicas.kernels.draft_window import DraftedKv, WindowRows, open_windows
from replicas.kernels.token_draw import draw_tokens
from replicas.speculation.drafter import NO_DRAFT, DraftRow

# Tokens of each row that one pass reads of sequences which the model has fallen behind.
CATCH_UP = 16
# What may be unread of a sequence that was drafted for in the step before: its last token, and a last draft that held.
_NEWEST = 2


class LoopParts:
    """What all loops of a drafter share. model: the draft model's; served: the served model's slots, with histories."""

    def __init__(self, model: PassModel, served: CudaSlots, num_ahead: int, vocab_sizes: tuple[int, int]) -> None:
        """num_ahead: the most drafts that are fed in a loop. vocab_sizes: of the draft model, of the served one."""
        assert served.history is not None, "a draft model reads histories"
        self.model, self.served, self.history = model, served, served.history
        self.kv = DraftedKv.empty(served.padding_slot, num_ahead, model.device)
        self.vocab_size, self.served_vocab_size = vocab_sizes

    def logits_of(self, window: int, slots: torch.Tensor, wanted: torch.Tensor) -> tuple[WindowRows, torch.Tensor]:
        """Read on: of each row its window, and logits behind its last token. Mutates the draft model's pool."""
        sharing, num_rows = self.model.sharing, len(slots)
        shares = sharing.empty_shares(self.model.device)
        rows = open_windows(
            self.served.state, self.history, self.kv, slots, wanted, window, self.vocab_size, shares, sharing.rows_at
        )
        sharing.share_out(rows.firsts, shares)
        layout = replace(
            launches_of(sharing, num_rows),
            num_queries=num_rows * window,
            most_queries=window,
            rows_at=sharing.rows_at,
        )
        table = self.model.slots.block_table
        step = CudaStep(table, rows.places, self.model.no_chunks, shares, layout.pack())
        return rows, self.model.logits(rows.ids, rows.positions, rows.last, step)

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, choices: torch.Tensor, has_sampled: bool
    ) -> torch.Tensor:
        """int64 [R]: as the served model will draw there, by these logits. lengths: int32, what is drawn behind; -1:
        nothing is."""
        known = logits[:, : self.served_vocab_size]
        return draw_tokens(
            known, self.model.slots.state, slots, lengths, choices, has_sampled=has_sampled, has_filtered=has_sampled
        )


class CatchUpPass:
    """Reads up to CATCH_UP tokens of each of some rows. Gives where those are that it reads to their ends."""

    def __init__(self, parts: LoopParts, num_rows: int) -> None:
        self._parts = parts
        self.static_input = row_values((), num_rows, parts.served.padding_slot).to(parts.model.device)

    def run(self) -> torch.Tensor:
        slots, wanted, _ = self.static_input
        return self._parts.logits_of(CATCH_UP, slots, wanted)[0].lengths


class DraftLoop:
    """num_drafts tokens for each of up to num_rows rows, in as many passes."""

    def __init__(self, parts: LoopParts, num_rows: int, num_drafts: int, has_sampled: bool) -> None:
        """has_sampled: whether rows' parameters may ask for noise; else drafts are the likeliest tokens."""
        self._parts, self._num_drafts, self._has_sampled = parts, num_drafts, has_sampled
        device = parts.model.device
        self.static_input = row_values((), num_rows, parts.served.padding_slot).to(device)
        self._drafts = torch.full((num_rows, num_drafts), NO_DRAFT, dtype=torch.int64, device=device)
        self._layout = launches_of(parts.model.sharing, num_rows).pack()

    def run(self) -> torch.Tensor:
        """int64 [num_rows, num_drafts], NO_DRAFT from where there is none: until the next run."""
        slots, wanted, choices = self.static_input
        parts, model = self._parts, self._parts.model
        rows, logits = parts.logits_of(_NEWEST, slots, wanted)
        lengths = rows.lengths
        for place in range(self._num_drafts):
            tokens = parts.draw(logits, slots, lengths, choices, self._has_sampled)
            fed = go_on(tokens, slots, wanted, lengths, self._drafts, place, 1, parts.kv.ahead)
            if place + 1 == self._num_drafts:
                break
            lengths = fed.lengths
            shares = model.sharing.share_out(fed.positions)
            step = CudaStep(model.slots.block_table, fed.places, model.no_chunks, shares, self._layout)
            logits = model.logits(fed.ids, fed.positions, 0, step)
        return self._drafts


def row_values(rows: Sequence[DraftRow], num_rows: int, padding_slot: int) -> torch.Tensor:
    """The static input of a loop: int32 [3, num_rows], slots, drafts wanted, choices. On the host."""
    padding = num_rows - len(rows)
    values = [
        [row.slot for row in rows] + [padding_slot] * padding,
        [row.num_drafts for row in rows] + [0] * padding,
        [row.choice for row in rows] + [0] * padding,
    ]
    return torch.from_numpy(np.array(values, dtype=np.int32))
