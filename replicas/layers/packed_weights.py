"""Weights of few bits as they lie in memory here, whatever the file that they come from.

fp8 and int8: a number each. int4: two in a byte, of 32 inputs next to each other the first 16 in the low halves and
the others in the high ones, so that both halves of 16 bytes are inputs in their order. Scales (and zero points) are of
one output and a group of inputs: blocks and whole tensors have them repeated, so that layers are joined by their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

HALF = 16  # inputs in the low halves of as many bytes; as many behind them in the high ones
PACKED_INPUTS = 2 * HALF
FP8 = torch.float8_e4m3fn
_OF_INPUTS = ("order", "input_scale", "rotation")


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Of one linear layer, N outputs and K inputs; a weight is (value - zero) * scale.

    values: e4m3 or int8 [N, K], or uint8 [N, K / 2]. scales: [N, groups of group_size inputs, the last may have less].
    zeros: uint8 of the scales' shape, with int4 only. order: int64 [K], the inputs as values have them, where that is
    another order. input_scale: float32 [1], of activations that are rounded by it. rotation: of the inputs
    (`replicas.layers.rounding.rotation`), in their type, where weights are of rotated ones.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    rotation: torch.Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1] * (2 if self.is_int4 else 1)

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def is_int4(self) -> bool:
        return self.values.dtype is torch.uint8

    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {name: getattr(self, name) for name in ("values", "scales", "zeros", *_OF_INPUTS)}


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0 to 15 -> [N, K / 2]. K is a multiple of 32."""
    low, high = values.unflatten(1, (-1, 2, HALF)).unbind(2)
    packed: torch.Tensor = (low | (high << 4)).flatten(1)
    return packed


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The reverse of `pack_int4`."""
    halves = packed.unflatten(1, (-1, HALF))
    unpacked: torch.Tensor = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
    return unpacked


def by_input(of_groups: torch.Tensor, group_size: int, num_inputs: int) -> torch.Tensor:
    """[N, groups] -> [N, num_inputs], each group's number for each of its inputs; [N, 1] stays, for all."""
    if of_groups.shape[1] == 1:
        return of_groups
    return of_groups.repeat_interleave(group_size, dim=1)[:, :num_inputs]


def dequantised(weights: PackedWeights, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in the order of `values`: the products in float32, rounded to the type once. Scales of 4-bit weights are
    rounded to it before, as everywhere such weights are served: then a number is one multiplication of that type."""
    values = unpack_int4(weights.values) if weights.is_int4 else weights.values
    scales = weights.scales.to(dtype) if weights.is_int4 else weights.scales
    numbers = values.float()
    if weights.zeros is not None:
        numbers = numbers - by_input(weights.zeros, weights.group_size, weights.num_inputs).float()
    return (numbers * by_input(scales, weights.group_size, weights.num_inputs).float()).to(dtype)


def joined(parts: Sequence[PackedWeights]) -> PackedWeights | None:
    """Outputs of all of them, one after the other; None where they differ in more than their rows."""
    first = parts[0]
    if len({part.group_size for part in parts}) > 1:
        return None
    for part in parts[1:]:
        for name, tensor in first.tensors().items():
            other = part.tensors()[name]
            if (tensor is None) != (other is None):
                return None
            if tensor is None or other is None:
                continue
            is_alike = tensor.dtype is other.dtype and tensor.device == other.device
            if not is_alike or tensor.shape[1:] != other.shape[1:]:
                return None
            if name in _OF_INPUTS and not torch.equal(tensor, other):
                return None

    def rows(name: str) -> torch.Tensor | None:
        found = [part.tensors()[name] for part in parts]
        return None if found[0] is None else torch.cat([one for one in found if one is not None])

    values, scales = rows("values"), rows("scales")
    assert values is not None
    assert scales is not None
    return replace(first, values=values, scales=scales, zeros=rows("zeros"))
