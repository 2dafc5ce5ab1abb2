"""What the runner keeps of each running sequence between steps, one row per slot.

The last token and its position stay here (on the GPU: on the GPU), so that the next step can be launched before anyone
has read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.sampling.draw import SamplingBatch
from replicas.sampling.sample_place import SamplePlace, counting
from replicas.sampling.slot_rules import SlotRules
from scheduler.plan import StepPlan
from scheduler.sampling_params import SamplingParams

UNKNOWN = -1  # a length


class SlotState:
    """block_table: int64 [num_slots, max_blocks]; last_token, length: int64 [num_slots]; sampling: one per slot.

    length: the position of the last token: KV from there on is none of the sequence's. Negative: nobody said.

    num_logprobs: of the slots that want them: how many most likely tokens. rules: what changes their logits.
    """

    def __init__(self, num_slots: int, max_blocks: int, max_len: int) -> None:
        self.block_table = torch.zeros(num_slots, max_blocks, dtype=torch.int64)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64)
        self.length = torch.full((num_slots,), UNKNOWN, dtype=torch.int64)
        self.sampling = [SamplingParams()] * num_slots
        self.num_logprobs: dict[int, int] = {}
        self.rules = SlotRules(num_slots, max_len)

    def apply(self, plan: StepPlan) -> None:
        """Take a plan's slot inits and table writes into account. Mutates."""
        for init in plan.slot_inits:
            self.sampling[init.slot] = init.sampling
            self.num_logprobs.pop(init.slot, None)
            if init.sampling.num_logprobs is not None:
                self.num_logprobs[init.slot] = init.sampling.num_logprobs
            if init.last_token is not None:
                self.last_token[init.slot] = init.last_token
            self.length[init.slot] = UNKNOWN if init.last_position is None else init.last_position
            self.rules.start(init)
        for write in plan.table_writes:
            self.block_table[write.slot, write.start : write.start + len(write.block_ids)] = torch.tensor(
                write.block_ids, dtype=torch.int64
            )

    def sampling_batch(self, places: Sequence[SamplePlace]) -> SamplingBatch:
        """Parameters of every token that is chosen."""
        rows = [(self.sampling[p.slot], p.choice, p.position) for p in places]
        return SamplingBatch.from_rows(rows, self.last_token.device)

    def store_tokens(self, places: Sequence[SamplePlace], tokens: torch.Tensor) -> None:
        """Feed back: tokens [n] become the last tokens of the places' next slots, of several the last one that counts.

        Mutates.
        """
        last, kept = places, None
        if any(place.guess is not None for place in places):
            counts = counting(places, tokens.tolist())
            of_slot = {place.next_slot: index for index, place in enumerate(places) if counts[index]}
            kept = list(of_slot.values())
            last = [places[index] for index in kept]
        slots, lengths = torch.tensor([[p.next_slot, p.position] for p in last], dtype=torch.int64).view(-1, 2).T
        # No token (a failed row) must still be some id: the next step may be planned already, and is dropped.
        tokens = tokens.clamp(min=0)
        self.last_token[slots] = tokens if kept is None else tokens[kept]
        self.length[slots] = lengths
        self.rules.store(places, tokens)
