"""What the GPU keeps of each running sequence: last token, parameters and block table, in one matrix on the device.

The host never reads it. Whatever a plan changes goes up in one pinned copy and one scatter, behind the steps in flight.
With drafts a slot also knows where its last token is, and has a history: the steps in flight move both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from replicas.device_copy import to_device
from replicas.kernels.slot_columns import BLOCK_TABLE, HISTORY, LAST_TOKEN, LENGTH, sampling_columns
from replicas.sampling.draw import GREEDY_BELOW, SamplingBatch
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.slot_rules import SlotRules
from replicas.sampling.slot_state import SlotState
from scheduler.plan import SlotInit, StepPlan
from scheduler.sampling_params import SamplingParams

_MOVED = (LAST_TOKEN, LENGTH, HISTORY)  # by what a step chooses, where there are drafts


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """is_plain: the drawing kernel knows every row's parameters. The rest: as `draw_tokens` asks."""

    is_plain: bool
    has_sampled: bool
    has_filtered: bool
    most_kept: int


class CudaSlots(SlotState):
    """state: int64 [num_slots + 1, BLOCK_TABLE + max_blocks]; the last row is the slot of padding rows.

    history: int32 [num_slots + 1, width], of the slots that may have drafts what they are looked for in: what the
    client expects, prompt, output; as many tokens as HISTORY says. None: there are no drafts.
    """

    def __init__(
        self, num_slots: int, max_blocks: int, max_len: int, device: torch.device, has_drafts: bool = False
    ) -> None:
        super().__init__(0, 0, 0)
        self.rules = SlotRules(num_slots, max_len, device)
        self.state = torch.zeros(num_slots + 1, BLOCK_TABLE + max_blocks, dtype=torch.int64, device=device)
        self.block_table = self.state[:, BLOCK_TABLE:]
        self.last_token = self.state[:, LAST_TOKEN]
        self.length = self.state[:, LENGTH]
        self.length.fill_(-1)
        self._max_expected = max_len
        self.history = torch.zeros(num_slots + 1, 2 * max_len, dtype=torch.int32, device=device) if has_drafts else None
        self._drafting: set[int] = set()  # slots with a history
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
            self._is_plain[init.slot] = is_plain(init.sampling)
            self.num_logprobs.pop(init.slot, None)
            if init.sampling.num_logprobs is not None:
                self.num_logprobs[init.slot] = init.sampling.num_logprobs
            self.rules.start(init)
            first = init.slot * width
            for column, value in sampling_columns(init.sampling).items():
                updates[first + column] = value
            if init.last_token is not None:
                updates[first + LAST_TOKEN] = init.last_token
            if self.history is not None:
                updates[first + HISTORY] = self._start_history(init, self.history)
                position = init.last_position if init.slot in self._drafting else None
                updates[first + LENGTH] = -1 if position is None else position
        if self._drafting:
            for chunk in plan.chunks:
                if chunk.num_sampled:  # where what it samples moves the slots from
                    ends = {chunk.slot, *(fork.slot for fork in chunk.forks)} & self._drafting
                    updates |= {slot * width + LENGTH: chunk.end - 1 for slot in ends}
        for write in plan.table_writes:
            first = write.slot * width + BLOCK_TABLE + write.start
            updates.update(zip(range(first, first + len(write.block_ids)), write.block_ids, strict=True))
        if updates:
            places, values = numbers_to_device([list(updates), list(updates.values())], self.state.device)
            self.state.view(-1).index_copy_(0, places, values)

    def _start_history(self, init: SlotInit, history: torch.Tensor) -> int:
        """How many tokens it has. 0: it has none; nobody may draft, or nobody knows where its last token is."""
        self._drafting.discard(init.slot)
        context = init.context
        last = () if init.last_token is None else (init.last_token,)
        if not init.may_draft or not context.prompt_ids or (last and init.last_position is None):
            return 0
        self._drafting.add(init.slot)
        ids = (*context.predicted_ids[: self._max_expected], *context.prompt_ids, *last)
        tokens = torch.from_numpy(np.fromiter(ids, np.int32, len(ids)))
        history[init.slot, : len(ids)].copy_(to_device(tokens, history.device))
        return len(ids)

    def positions(self, places: Sequence[SamplePlace]) -> torch.Tensor:
        """Of the tokens to choose, int64 [R] on the device: of slots that steps in flight may move, where these are by
        now. Does not wait."""
        planned = [place.position for place in places]
        if not self._drafting:
            return numbers_to_device(planned, self.state.device)
        seen: Counter[int] = Counter()
        numbers = []
        for place in places:
            numbers.append(seen[place.next_slot])
            seen[place.next_slot] += 1
        slots, offsets, given = numbers_to_device(
            [[place.next_slot for place in places], numbers, planned], self.state.device
        )
        length = self.length[slots]
        return torch.where(length >= 0, length + 1 + offsets, given)

    def sampling_batch(self, places: Sequence[SamplePlace]) -> SamplingBatch:
        batch = super().sampling_batch(places)
        return replace(batch, position=self.positions(places)) if self._drafting else batch

    def moved(self) -> torch.Tensor:
        """What a step's choice moves, as it is now: for `move_back`. Does not wait."""
        if self.history is None:
            return self.last_token.clone()
        return torch.stack([self.state[:, column] for column in _MOVED], 1)

    def move_back(self, slots: Sequence[int], moved: torch.Tensor) -> None:
        """Of these slots. Mutates."""
        own = numbers_to_device(list(slots), self.state.device)
        if self.history is None:
            self.last_token.index_copy_(0, own, moved[own])
            return
        for column, values in zip(_MOVED, moved[own].unbind(1), strict=True):
            self.state[:, column].index_copy_(0, own, values)

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


def is_plain(params: SamplingParams) -> bool:
    """Whether nothing but what `sampling_columns` keeps differs from the neutral value, fields to come included."""
    known = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return replace(SamplingParams(), **known) == params
