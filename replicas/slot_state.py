"""What the runner keeps of each running sequence between steps, one row per slot.

The last token stays here (on the GPU: on the GPU), so that the next step can be launched before anyone
has read it.
"""

from __future__ import annotations

import torch

from replicas.sampling import SamplingBatch
from scheduler.plan import DecodeRow, SampleTarget, StepPlan
from scheduler.sampling_params import SamplingParams


class SlotState:
    """block_table: int64 [num_slots, max_blocks]; last_token: int64 [num_slots]; sampling: one per slot."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.block_table = torch.zeros(num_slots, max_blocks, dtype=torch.int64)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64)
        self.sampling = [SamplingParams()] * num_slots

    def apply(self, plan: StepPlan) -> None:
        """Take a plan's slot inits and table writes into account. Mutates."""
        for init in plan.slot_inits:
            self.sampling[init.slot] = init.sampling
            if init.last_token is not None:
                self.last_token[init.slot] = init.last_token
        for write in plan.table_writes:
            self.block_table[write.slot, write.start : write.start + len(write.block_ids)] = torch.tensor(
                write.block_ids, dtype=torch.int64
            )

    def sampling_batch(self, plan: StepPlan) -> SamplingBatch:
        """Parameters of every token the plan samples: its rows, then its chunks' targets.

        A prompt's n first tokens all use the prompt's own slot; only the choice differs.
        """
        rows = [(self.sampling[row.slot], row.choice, row.position + 1) for row in plan.rows]
        for chunk in plan.chunks:
            position = chunk.start + len(chunk.token_ids)
            rows += [(self.sampling[chunk.slot], target.choice, position) for target in chunk.targets]
        return SamplingBatch.from_rows(rows, self.last_token.device)

    def store_tokens(self, outputs: list[DecodeRow | SampleTarget], tokens: torch.Tensor) -> None:
        """Feed back: tokens [n] become the last tokens of the outputs' slots. Mutates."""
        slots = torch.tensor([output.slot for output in outputs], dtype=torch.int64)
        # No token (a failed row) must still be some id: the next step may be planned already, and is dropped.
        self.last_token[slots] = tokens.clamp(min=0)
