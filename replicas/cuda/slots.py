"""What the GPU keeps of each running sequence: last token, parameters and block table, in one matrix on the device.

The host never reads it. Whatever a plan changes goes up in one pinned copy and one scatter, behind the steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from replicas.device_copy import to_device
from replicas.kernels.slot_columns import BLOCK_TABLE, LAST_TOKEN, sampling_columns
from replicas.sampling.draw import GREEDY_BELOW
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.slot_rules import SlotRules
from replicas.sampling.slot_state import SlotState
from scheduler.plan import StepPlan
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """is_plain: the drawing kernel knows every row's parameters. The rest: as `draw_tokens` asks."""

    is_plain: bool
    has_sampled: bool
    has_filtered: bool
    most_kept: int


class CudaSlots(SlotState):
    """state: int64 [num_slots + 1, BLOCK_TABLE + max_blocks]; the last row is the slot of padding rows."""

    def __init__(self, num_slots: int, max_blocks: int, max_len: int, device: torch.device) -> None:
        super().__init__(0, 0, 0)
        self.rules = SlotRules(num_slots, max_len, device)
        self.state = torch.zeros(num_slots + 1, BLOCK_TABLE + max_blocks, dtype=torch.int64, device=device)
        self.block_table = self.state[:, BLOCK_TABLE:]
        self.last_token = self.state[:, LAST_TOKEN]
        self.sampling = [SamplingParams()] * num_slots
        self._is_plain = [True] * num_slots

    @property
    def padding_slot(self) -> int:
        return len(self.sampling)

    def apply(self, plan: StepPlan) -> None:
        """Take a plan's slot inits and table writes into account. Mutates; does not wait for the device."""
        width = self.state.shape[1]
        updates: dict[int, int] = {}  # by place in the flat matrix; a later write of a place counts
        for init in plan.slot_inits:
            self.sampling[init.slot] = init.sampling
            self._is_plain[init.slot] = _is_plain(init.sampling)
            self.num_logprobs.pop(init.slot, None)
            if init.sampling.num_logprobs is not None:
                self.num_logprobs[init.slot] = init.sampling.num_logprobs
            self.rules.start(init)
            first = init.slot * width
            for column, value in sampling_columns(init.sampling).items():
                updates[first + column] = value
            if init.last_token is not None:
                updates[first + LAST_TOKEN] = init.last_token
        for write in plan.table_writes:
            first = write.slot * width + BLOCK_TABLE + write.start
            updates.update(zip(range(first, first + len(write.block_ids)), write.block_ids, strict=True))
        if updates:
            places, values = numbers_to_device([list(updates), list(updates.values())], self.state.device)
            self.state.view(-1).index_copy_(0, places, values)

    def store_tokens(self, places: Sequence[SamplePlace], tokens: torch.Tensor) -> None:
        tokens = tokens.clamp(min=0)
        slots = numbers_to_device([place.next_slot for place in places], self.state.device)
        self.last_token.index_copy_(0, slots, tokens)
        self.rules.store(places, tokens)

    def kinds(self, plan: StepPlan) -> SamplingKinds:
        """Of all tokens that the plan samples."""
        slots = [part.slot for part in plan.slices if part.num_sampled]
        params = [self.sampling[slot] for slot in slots]
        sampled = [p for p in params if p.temperature >= GREEDY_BELOW]
        return SamplingKinds(
            all(self._is_plain[slot] for slot in slots),
            bool(sampled),
            any(p.top_k > 0 or p.top_p < 1.0 for p in sampled),
            max(p.top_k for p in sampled) if sampled and all(p.top_k > 0 for p in sampled) else 0,
        )


def numbers_to_device(values: list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    """int64 on the device. Does not wait."""
    return to_device(torch.from_numpy(np.array(values, dtype=np.int64)), device)  # torch.tensor takes six times as long


def _is_plain(params: SamplingParams) -> bool:
    """Whether nothing but what `sampling_columns` keeps differs from the neutral value, fields to come included."""
    known = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return replace(SamplingParams(), **known) == params
