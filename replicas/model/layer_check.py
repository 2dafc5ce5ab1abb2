"""Quantised layers as a device computes them, each compared with its definition, alone.

Rounding of inputs makes the logits of a whole model differ by much (`self_check`), which could hide a fault of one
layer. Of one layer by itself it changes next to nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from replicas.layers.further_products import MakesFurtherProducts
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.model_support import UnsupportedModel

logger = logging.getLogger(__name__)

# A step of one row, of some that fill no tile, of as many as kernels for few rows take, and of more.
_NUM_ROWS = (1, 35, 64, 100)
_WEIGHTS_AT_ONCE = 1 << 24
# Of the mean size of a layer's outputs, root mean square: rounded to bfloat16 they are 0.0017 off, and sums of fp8 in
# matrix units less than that again. 32 inputs of 14,336 left out make 0.05.
_LARGEST_ERROR = 0.01
# Of the largest output: a wrong one among thousands.
_LARGEST_OF_ONE = 0.04


@dataclass(frozen=True, slots=True)
class ComparedLayer:
    """error, of_one: as the limits above, of a step of num_rows; not of numbers where outputs are none."""

    name: str
    num_outputs: int
    num_inputs: int
    num_rows: int
    error: float
    of_one: float

    @property
    def is_right(self) -> bool:
        return self.error <= _LARGEST_ERROR and self.of_one <= _LARGEST_OF_ONE

    def describe(self) -> str:
        return (
            f"{self.name} ({self.num_outputs} x {self.num_inputs}) with {self.num_rows} rows differs from its "
            f"definition by {self.error:.2g} of its outputs' size, one output by {self.of_one:.2g} of the largest"
        )


def check_layers(model: nn.Module, dtype: torch.dtype) -> float:
    """The largest error of all. Raises UnsupportedModel naming the first layer that is wrong. Blocks for less than a
    second on a card. dtype: of the model's inputs."""
    largest, num_compared = 0.0, 0
    for compared in compare_layers(model, dtype):
        if not compared.is_right:
            raise UnsupportedModel(
                f"{type(model).__name__}: {compared.describe()}; serving it would give wrong text. Another "
                "model.quantise, or none, may be right on this device"
            )
        largest, num_compared = max(largest, compared.error), num_compared + 1
    if num_compared:
        extra = {"event": "layer_check", "max_error": round(largest, 5), "num_products": num_compared}
        logger.info("quantised layers are right", extra=extra)
    return largest


@torch.inference_mode()
def compare_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[ComparedLayer]:
    """Each quantised layer that a device has an own product for, by each number of rows; and what other layers have
    made within that product. Needs memory for a few hundred megabytes of numbers at a time, whatever the layer's size.
    """
    # By its class: what wraps a layer may pass all of its names on.
    are_makers = (module for module in model.modules() if hasattr(type(module), "further_products"))
    makers = [module for module in are_makers if isinstance(module, MakesFurtherProducts)]
    made = [further for maker in makers for further in maker.further_products()]
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantisedLinear) or type(layer) is QuantisedLinear:
            continue
        x = _inputs(layer.in_features, dtype, layer.values.device)
        product = torch.cat([part(x).float() for part in _parts(layer)], dim=1)
        yield from _compared(name, layer, x, layer, product)
        onto = product.roll(1, 1).to(dtype)
        for further in made:
            if further.linear is layer:
                wanted = further.define(product, onto.float())
                compute = _onto_last(further.compute, onto)
                yield from _compared(f"{name}, its {further.name}", layer, x, compute, wanted)


def _onto_last(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], onto: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: compute(rows, onto[len(onto) - len(rows) :])


def _compared(
    name: str, layer: QuantisedLinear, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor],
    wanted: torch.Tensor,
) -> Iterator[ComparedLayer]:  # fmt: skip
    """compute: of some of the last rows of x, what those of wanted are. What x's type has no number for is the largest
    one to both."""
    largest = torch.finfo(x.dtype).max
    wanted = wanted.clamp(-largest, largest)
    for num_rows in _NUM_ROWS:
        rows = slice(len(x) - num_rows, None)
        differences = (compute(x[rows]).float().clamp(-largest, largest) - wanted[rows]).abs()
        size = wanted[rows].square().mean().sqrt().clamp(min=1e-30)
        most = wanted[rows].abs().amax(1).clamp(min=1e-30)
        yield ComparedLayer(
            name, layer.out_features, layer.in_features, num_rows,
            float(differences.square().mean().sqrt() / size), float((differences.amax(1) / most).max()),
        )  # fmt: skip


def _inputs(num_inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[the most rows, num_inputs]: of unlike sizes, one with a number that is far larger than the others, one of
    zeros."""
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(max(_NUM_ROWS), num_inputs, generator=generator)
    x *= 2.0 ** (torch.arange(len(x)) % 5 - 2.0)[:, None]
    x[-2] = 0.0
    x[-3, num_inputs // 3] = 100.0
    return x.to(device, dtype)


def _parts(layer: QuantisedLinear) -> Iterator[QuantisedLinear]:
    """Its definition, some outputs at a time."""
    weights = layer.weights
    step = max(1, _WEIGHTS_AT_ONCE // weights.num_inputs)
    for first in range(0, weights.num_outputs, step):
        rows = slice(first, first + step)
        zeros = None if weights.zeros is None else weights.zeros[rows]
        part = replace(weights, values=weights.values[rows], scales=weights.scales[rows], zeros=zeros)
        bias = None if layer.bias is None else nn.Parameter(layer.bias[rows], requires_grad=False)
        yield QuantisedLinear(part, bias, layer.scheme)
