"""An EAGLE-3 head on a card: bound to its layer of the pool, with what it made of each sequence's last token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from replicas.cuda.attention import cuda_attention, library_attention
from replicas.cuda.card_linear import card_linear
from replicas.cuda.slots import CudaSlots
from replicas.cuda.step import CudaStep
from replicas.kernels.slot_columns import BLOCK_TABLE, LENGTH
from replicas.kernels.token_draw import draw_tokens
from replicas.kernels.work_sharing import WorkSharing
from replicas.kv.kv_pool import KvPool
from replicas.layers.place import each_layer
from replicas.layers.replaced_layers import Replacement, replace_layers
from replicas.speculation.eagle3_head import Eagle3Head


class CardHead:
    """outputs: [num_slots + 1, hidden size], positions: int64 [num_slots + 1]: of each slot the head's output that its
    next draft comes from, and the position of the last token when it was made, -1: there is none."""

    def __init__(self, head: Eagle3Head, pool: KvPool, slots: CudaSlots) -> None:
        """pool: with a layer for the head behind the model's. slots: the runner's. Mutates the head."""
        layout, attention = pool.layout, head.layer.self_attn
        self.device, self.slots, self._head = pool.tensor.device, slots, head
        self.vocab_size = int(head.embed_tokens.weight.shape[0])
        attention.attend = cuda_attention
        attention.register_buffer("paged_kv", pool.tensor[:, attention.layer_idx], persistent=False)
        attention.register_buffer("kv_scales", None, persistent=False)
        replace_layers(head, (Replacement("card_linear", partial(each_layer, make=card_linear), is_usual=False),))
        properties = torch.cuda.get_device_properties(self.device)
        num_slots, dtype = slots.padding_slot, head.fc.weight.dtype
        self.sharing = WorkSharing.of(
            layout.num_kv_heads, layout.head_dim, dtype, properties.multi_processor_count, num_slots
        )
        self.no_chunks = torch.zeros(2, 3, dtype=torch.int32, device=self.device)
        self.outputs = torch.zeros(num_slots + 1, head.config.layer.hidden_size, dtype=dtype, device=self.device)
        self.positions = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=self.device)
        # Sampling parameters, apart from the runner's: what is drawn here is no slot's last token.
        self.drawing = slots.state[:, :BLOCK_TABLE].clone()

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self._head.config.layer_ids

    def fused(self, states: Tensor) -> Tensor:
        """As of the head."""
        return self._head.fused(states)

    def compute(self, hidden: Tensor, next_ids: Tensor, positions: Tensor, step: CudaStep) -> Tensor:
        """As the head's. positions: int32 [n], -1 in padding. Mutates the pool."""
        with library_attention():
            output: Tensor = self._head(hidden, next_ids, positions.clamp(min=0).long(), step)
        return output

    def keep(self, slots: Tensor, outputs: Tensor, positions: Tensor) -> None:
        """Of slots [n] what the head made behind their last tokens, and where these are. Mutates."""
        self.outputs.index_copy_(0, slots.long(), outputs)
        self.positions.index_copy_(0, slots.long(), positions.long())

    def begin(self, slots: Tensor) -> None:
        """int64 [n]: other sequences have them, with other parameters. Mutates."""
        self.drawing.index_copy_(0, slots, self.slots.state[slots, :BLOCK_TABLE])
        self.positions.index_fill_(0, slots, -1)

    def lengths(self, slots: Tensor, wanted: Tensor) -> Tensor:
        """int32 [n]: where slots' last tokens are; -1 where no output is of there, or nothing is wanted."""
        index = slots.long()
        length = self.slots.state[index, LENGTH]
        is_there = (wanted > 0) & (length >= 0) & (length == self.positions[index])
        return torch.where(is_there, length, -1).int()

    def draw(self, outputs: Tensor, slots: Tensor, lengths: Tensor, choices: Tensor, has_sampled: bool) -> Tensor:
        """int64 [n], the served model's ids: the likeliest, or with noise those that this model would draw there, by
        these outputs. lengths: int32, what is drawn behind; -1: nothing is."""
        if has_sampled:
            logits = self._head.logits(outputs, self.vocab_size)
            return draw_tokens(logits, self.drawing, slots, lengths, choices)
        known = self._head.draft_logits(outputs)
        drawn = draw_tokens(known, self.drawing, slots, lengths, choices, has_sampled=False, has_filtered=False)
        return torch.where(drawn >= 0, self._head.target_ids[drawn.clamp(min=0)], drawn)
