"""Numbers rounded to few bits: activations of a product, row by row, and weights of a model that is not quantised.

A number is its rounded value times a scale. Scales are float32.
"""

from __future__ import annotations

import torch

from replicas.layers.packed_weights import FP8, PackedWeights, pack_int4

LARGEST = {FP8: 448.0, torch.int8: 127.0}
_LARGEST_INT4 = 15


def round_rows(x: torch.Tensor, dtype: torch.dtype, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, K] -> values of this type [R, K] and scales [R, groups of group_size of K]: by the largest number of each.

    A row's result depends on that row alone.
    """
    num_inputs = x.shape[1]
    if group_size >= num_inputs:
        numbers = x.float()
        scales = _scales(numbers.abs().amax(1, keepdim=True), dtype)
        return _whole(numbers / scales, dtype), scales
    groups = torch.nn.functional.pad(x.float(), (0, -num_inputs % group_size)).unflatten(1, (-1, group_size))
    scales = _scales(groups.abs().amax(2), dtype)
    return _whole(groups / scales.unsqueeze(2), dtype).flatten(1)[:, :num_inputs], scales


def round_by(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [R, K] -> values of this type by a given scale [1]. What is larger becomes the largest."""
    return _whole((x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype]), dtype)


def _scales(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 for what is nothing but zeros."""
    # By a tensor on its device: by a Python number a card multiplies with the reciprocal, which is another rounding.
    return torch.where(largest > 0, largest / torch.full_like(largest, LARGEST[dtype]), 1.0)


def _whole(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """numbers: none is larger than the largest of the type by more than rounding."""
    return numbers.to(dtype) if dtype is FP8 else numbers.round().to(dtype)


def round_weights(weight: torch.Tensor, dtype: torch.dtype, rotation: torch.Tensor | None = None) -> PackedWeights:
    """weight [N, K] to fp8 or int8, by the largest number of each output. rotation: of its inputs, K / n blocks."""
    if rotation is not None:
        weight = rotated(weight.float(), rotation) / float(rotation[0].float().square().sum())
    values, scales = round_rows(weight, dtype, weight.shape[1])
    return PackedWeights(values.contiguous(), scales, weight.shape[1], rotation=rotation)


def rotation(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Hadamard's matrix after Sylvester, [size, size], a power of two, over its root or, so that products are exact,
    over the next smaller power of two: times itself it is one, or twice that.

    A few inputs that are far larger than the others are spread over their block by it, and the others keep more of
    their digits when all are rounded by one scale (Ashkboos et al., "QuaRot", 2024).
    """
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / (1 << (size.bit_length() - 1) // 2)


def rotated(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """rows [R, K], by [n, n], n divides K: each n inputs of a row together, in the type of rows."""
    blocks = rows.unflatten(1, (-1, len(by)))
    turned: torch.Tensor = (blocks @ by.to(rows.dtype)).flatten(1)
    return turned


def round_weights_int4(weight: torch.Tensor, group_size: int) -> PackedWeights:
    """weight [N, K] to 4 bits: each group's range in 16 steps, zero among them. group_size divides K."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    steps = (high - low) / _LARGEST_INT4
    scales = torch.where(steps > 0, steps, 1.0)
    zeros = (-low / scales).round()
    values = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, _LARGEST_INT4)
    return PackedWeights(pack_int4(values.to(torch.uint8).flatten(1)), scales, group_size, zeros.to(torch.uint8))
