"""Drafts by somebody who knows the text, and errs as often as asked: what a trained head would cost, and bring.

Of a benchmark, never of a server. The products of an EAGLE head are computed, on weights of no meaning: for each draft,
one layer of the model's and a head of fewer tokens, one after the other, as each draft needs the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from replicas.cuda.slots import CudaSlots, numbers_to_device
from replicas.speculation.drafter import DraftRow
from scheduler.plan import SlotInit


class OracleDrafter:
    """behind: of each token the one that follows. holding: how often each draft is right, if those in front are."""

    def __init__(
        self, slots: CudaSlots, behind: torch.Tensor, holding: Sequence[float], config: dict[str, Any], head_size: int
    ) -> None:
        """config: the shape's."""
        device = slots.state.device
        self._slots, self._behind = slots, behind.to(device)
        self._holding = torch.tensor(holding, device=device)
        self._random = torch.Generator(device).manual_seed(3)
        dim, inner = config["hidden_size"], config["intermediate_size"]
        head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
        joined = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head_dim

        def weight(num_out: int, num_in: int) -> torch.Tensor:
            return torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device) / num_in**0.5

        # Its attention takes the token's embedding beside the hidden state: twice as wide.
        self._joined, self._out = weight(joined, 2 * dim), weight(dim, config["num_attention_heads"] * head_dim)
        self._up, self._down, self._head = weight(2 * inner, dim), weight(dim, inner), weight(head_size, dim)
        self._width = config["num_attention_heads"] * head_dim

    def start(self, init: SlotInit) -> None:
        """The text is known."""

    def draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        most = max(row.num_drafts for row in rows)
        token = self._slots.last_token[numbers_to_device([row.slot for row in rows], self._behind.device)]
        state = torch.zeros(len(rows), self._joined.shape[1], dtype=torch.bfloat16, device=token.device)
        drafts = []
        for _ in range(most):
            state = self._products(state)
            token = self._behind[token]
            drafts.append(token)
        found = torch.stack(drafts, 1)
        is_right = torch.rand(found.shape, generator=self._random, device=found.device) < self._holding[:most]
        return torch.where(is_right, found, 0)

    def accepted(self, slots: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """The text is known."""

    def _products(self, state: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(F.linear(state, self._joined)[:, : self._width], self._out)
        gate, up = F.linear(hidden, self._up).chunk(2, 1)
        hidden = hidden + F.linear(F.silu(gate) * up, self._down)
        F.linear(hidden, self._head).argmax(1)
        return torch.cat([hidden, hidden], 1)
