"""A pass whose tokens the drawing kernel chooses in a second phase, and what that kernel is told of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.cuda.slots import SamplingKinds
from replicas.device_copy import to_device
from replicas.model.model_runner import ForwardHandle
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
    def of(cls, plan: StepPlan, kinds: SamplingKinds, device: torch.device) -> DrawnRows:
        """One copy. Does not wait."""
        places = SamplePlace.all_of(plan)
        # A prompt's choices have the parameters of the slot that ends it, and feed slots of their own.
        numbers = [[p.next_slot for p in places], [p.position - 1 for p in places], [p.choice for p in places]]
        slots, positions, choices = to_device(torch.from_numpy(np.array(numbers, dtype=np.int32)), device)
        return cls(slots, positions, choices, kinds)


@dataclass(frozen=True, slots=True)
class DrawnForward(ForwardHandle):
    """drawn: of its rows of logits, which there are; on its way before anybody waits for masks. None: other code
    chooses."""

    drawn: DrawnRows | None = None
