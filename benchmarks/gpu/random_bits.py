"""Random numbers for weights of few bits that an engine's dummy loader leaves zeros, or as memory had them.

A card multiplies zeros faster: 1,300 -> 1,470 TFLOP/s of e4m3, 687 -> 807 of bfloat16 (H200; its power is what is
shared out). vLLM's dummy weights lie between -0.001 and 0.001, where e4m3 has nothing but 0; integers it leaves alone.
"""

from __future__ import annotations

import torch

_NUMBERS_AT_ONCE = 1 << 26
_SPREAD = 100.0  # of e4m3, whose largest number is 448
_INTEGERS = (torch.int32, torch.uint8, torch.int8)
_FEWEST = 1 << 20  # numbers of a weight: an index or a table of places has fewer


@torch.no_grad()
def fill_few_bits(model: torch.nn.Module) -> int:
    """Bytes that are random now. Mutates its parameters in place, so that captured graphs read them. Where an engine
    computes: it is sent there by name."""
    num_bytes = 0
    for parameter in model.parameters():
        weight = parameter.data
        if weight.numel() < _FEWEST or weight.dtype not in (torch.float8_e4m3fn, *_INTEGERS):
            continue
        for part in weight.split(max(1, _NUMBERS_AT_ONCE * len(weight) // weight.numel())):
            part.copy_(_random(part.shape, weight.dtype, weight.device))
        num_bytes += weight.nbytes
    return num_bytes


def _random(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is torch.float8_e4m3fn:
        return torch.randn(shape, device=device).mul_(_SPREAD).clamp_(-448.0, 448.0)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64, device=device)
