"""What the drawing kernel is told of the rows of a pass whose tokens it chooses in a second phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.cuda.slots import CudaSlots, SamplingKinds
from replicas.device_copy import to_device
from replicas.sampling.sample_place import SamplePlace
from scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """slots, positions (of the token that was fed), choices: as `draw_tokens` asks, int32 on the device, one for each
    token that the plan samples."""

    slots: Tensor
    positions: Tensor
    choices: Tensor
    kinds: SamplingKinds

    @classmethod
    def of(cls, plan: StepPlan, kinds: SamplingKinds, slots: CudaSlots) -> DrawnRows:
        """One copy, and one more where steps in flight may move the slots. Does not wait."""
        places = SamplePlace.all_of(plan)
        # A prompt's choices have the parameters of the slot that ends it, and feed slots of their own.
        numbers = [[p.next_slot for p in places], [p.position - 1 for p in places], [p.choice for p in places]]
        of_rows, positions, choices = to_device(torch.from_numpy(np.array(numbers, dtype=np.int32)), slots.state.device)
        if slots.history is not None:
            positions = (slots.positions(places) - 1).int()
        return cls(of_rows, positions, choices, kinds)
