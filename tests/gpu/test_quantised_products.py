"""Products of weights of few bits against the definition: sizes that no tile divides, groups, parts, bias."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.int4_product import int4_product
from replicas.kernels.int4_words import group_factors, words_of
from replicas.kernels.round_rows import round_rows
from replicas.kernels.scaled_product import scaled_product
from replicas.kernels.skinny_product import ProductTile
from replicas.layers import rounding
from replicas.layers.packed_weights import FP8, PackedWeights, by_input, dequantised, pack_int4
from tests.gpu.paged_case import TOLERANCE, relative_error

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def arrived_of(num_out: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(-(-num_out // 64), dtype=torch.int32, device=device)


class Int4Case(NamedTuple):
    """A product of weights of 4 bits, random, on a CPU; expected: by the definition, in float64."""

    x: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor | None
    expected: torch.Tensor

    def weights_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """As kernels have them: words, factors."""
        return words_of(self.values).to(device), group_factors(self.scales, self.zeros).to(device)

    def bias_on(self, device: torch.device) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.to(device)


def int4_case(
    num_rows: int, num_out: int, num_in: int, group_size: int, dtype: torch.dtype, has_bias: bool
) -> Int4Case:  # fmt: skip
    torch.manual_seed(3)
    values = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    scales = (torch.rand(num_out, num_in // group_size) + 0.5).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    weights = PackedWeights(pack_int4(values), scales, group_size, zeros)
    x = torch.randn(num_rows, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = x.double() @ dequantised(weights, dtype).double().T + (bias.double() if bias is not None else 0.0)
    return Int4Case(x, values, scales, zeros, bias, expected)


@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize("group_size", [2048, 128])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_rows_are_rounded_as_by_the_definition(
    device: torch.device, kind: torch.dtype, group_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 1300).to(dtype)
    x[1], x[2, 7], x[3] = 0.0, 1000.0, torch.arange(1300) % 255 - 127
    values, scales = round_rows(x.to(device), kind, group_size)
    wanted, wanted_scales = rounding.round_rows(x, kind, group_size)
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(values.cpu().float(), wanted.float())


@pytest.mark.parametrize("kind", [FP8, torch.int8])
def test_a_row_of_more_than_a_program_holds_is_rounded_as_by_the_definition(
    device: torch.device, kind: torch.dtype
) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 40_001)
    x[1, 40_000] = 50.0
    values, scales = round_rows(x.to(device), kind, 40_001)
    wanted, wanted_scales = rounding.round_rows(x, kind, 40_001)
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(values.cpu().float(), wanted.float())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_product_is_added_to_what_it_is_given_once_it_is_rounded(
    device: torch.device, has_bias: bool, num_parts: int
) -> None:
    dtype, num_rows, num_out, num_in = DTYPES[-1], 5, 70, 256
    torch.manual_seed(4)
    x, x_scales = (part.to(device) for part in rounding.round_rows(torch.randn(num_rows, num_in), FP8, num_in))
    weight, scales = (part.to(device) for part in rounding.round_rows(torch.randn(num_out, num_in), FP8, num_in))
    bias = torch.randn(num_out).to(dtype).to(device) if has_bias else None
    onto, arrived = (100 * torch.randn(num_rows, num_out)).to(dtype).to(device), arrived_of(num_out, device)
    alone, added = (
        scaled_product(
            x, x_scales, weight, scales, num_in, bias, ProductTile(64, 128, 4, 3, num_parts), arrived, dtype, given
        )
        for given in (None, onto)
    )
    assert torch.equal(added, onto + alone)
    assert not arrived.any()


@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "group_size", "num_parts"),
    [(1, 200, 96, 96, 1), (17, 64, 576, 576, 2), (64, 100, 1000, 1000, 4), (3, 130, 320, 128, 2), (20, 70, 640, 64, 4)],
)
def test_scaled_products(
    device: torch.device, kind: torch.dtype, has_bias: bool, dtype: torch.dtype, num_rows: int, num_out: int,
    num_in: int, group_size: int, num_parts: int,
) -> None:  # fmt: skip
    """Scales of rows, of the whole, and of groups."""
    if kind is torch.int8 and group_size < num_in:
        pytest.skip("int8 has a scale an output")
    torch.manual_seed(2)
    x, x_scales = rounding.round_rows(torch.randn(num_rows, num_in), kind, group_size)
    weight, scales = rounding.round_rows(torch.randn(num_out, num_in), kind, group_size)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    numbers = [
        values.double() * by_input(of, group_size, num_in).double() for values, of in ((x, x_scales), (weight, scales))
    ]
    expected = numbers[0] @ numbers[1].T + (bias.double() if bias is not None else 0.0)
    arrived = arrived_of(num_out, device)
    outs = [
        scaled_product(
            x.contiguous().to(device), x_scales.to(device), weight.contiguous().to(device), scales.to(device),
            group_size, None if bias is None else bias.to(device), ProductTile(64, 128, 4, 3, num_parts),
            arrived, dtype,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert outs[0].dtype is dtype
    assert relative_error(outs[0], expected) < TOLERANCE[dtype]
    assert torch.equal(outs[0], outs[1])
    assert not arrived.any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "group_size", "num_parts"),
    [
        (1, 200, 96, 32, 1), (17, 64, 576, 64, 2), (64, 100, 1024, 128, 4), (3, 130, 320, 320, 2), (2, 64, 192, 96, 1),
        (5, 128, 512, 128, 2), (4, 130, 576, 64, 4),
    ],
)  # fmt: skip
def test_products_of_4_bits(
    device: torch.device, has_bias: bool, dtype: torch.dtype, num_rows: int, num_out: int, num_in: int,
    group_size: int, num_parts: int,
) -> None:  # fmt: skip
    case = int4_case(num_rows, num_out, num_in, group_size, dtype, has_bias)
    arrived = arrived_of(num_out, device)
    outs = [
        int4_product(
            case.x.to(device), *case.weights_on(device), group_size, case.bias_on(device),
            ProductTile(64, 128, 4, 3, num_parts), arrived,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert relative_error(outs[0], case.expected) < TOLERANCE[dtype]
    assert torch.equal(outs[0], outs[1])
    assert not arrived.any()


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_each_weight_of_4_bits_meets_its_input(device: torch.device, num_rows: int, group_size: int) -> None:
    """One that is not zero at a time, inputs that are all unlike, scales that neighbours do not have."""
    dtype, num_in = DTYPES[0], 256
    x = (torch.arange(1, num_in + 1) + 3 * torch.arange(num_rows)[:, None]).to(dtype)
    values = torch.full((num_in, num_in), 8, dtype=torch.uint8) + torch.eye(num_in, dtype=torch.uint8)
    outputs, groups = torch.arange(num_in)[:, None], torch.arange(num_in // group_size)
    scales, zeros = torch.exp2((outputs + groups) % 3).half(), torch.full((num_in, len(groups)), 8, dtype=torch.uint8)
    out = int4_product(
        x.to(device), words_of(values).to(device), group_factors(scales, zeros).to(device), group_size, None,
        ProductTile(64, 128, 4, 3, 1), arrived_of(num_in, device),
    )  # fmt: skip
    assert torch.equal(out.cpu(), x * scales[outputs[:, 0], outputs[:, 0] // group_size])
