"""Small tensors on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device. A copy to a GPU does not synchronise with the host."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
