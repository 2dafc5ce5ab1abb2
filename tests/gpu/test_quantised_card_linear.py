"""A quantised layer on a card computes what its definition in plain PyTorch does, with few rows and with many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.card_linear import card_linear
from replicas.cuda.int4_card_linear import Int4CardLinear
from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.cuda.quantised_tiles import SMALLEST_BYTES, int4_tile, scaled_tile
from replicas.cuda.skinny_linear import count_apart
from replicas.kernels.int4_unpack import int4_unpack
from replicas.kernels.int4_words import group_factors, numbers_of, words_of
from replicas.layers.packed_weights import FP8, PackedWeights, dequantised, unpack_int4
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import rotation, round_rows, round_weights, round_weights_int4
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from tests.gpu.paged_case import TOLERANCE, relative_error

pytestmark = pytest.mark.interpreted

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
NUM_OUT, NUM_IN = 160, 256


def scheme(kind: WeightKind, granularity: Granularity, activations: Activations, size: int | None = None) -> Scheme:
    return Scheme(kind, granularity, activations, Dialect.MADE_HERE, size)


def made(name: str) -> tuple[PackedWeights, Scheme]:
    torch.manual_seed(4)
    weight = torch.randn(NUM_OUT, NUM_IN)
    channel, static = Granularity.CHANNEL, torch.tensor([0.02])
    if name == "int4":
        return round_weights_int4(weight, 64), scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, 64)
    if name == "int4 in an order":
        packed, of = made("int4")
        return replace(packed, order=torch.randperm(NUM_IN)), of
    if name == "int8":
        return round_weights(weight, torch.int8), scheme(WeightKind.INT8, channel, Activations.TOKEN)
    if name == "int8 rotated":
        of = scheme(WeightKind.INT8, channel, Activations.TOKEN)
        return round_weights(weight, torch.int8, rotation(64, DTYPE, torch.device("cpu"))), of
    if name == "int8 static":
        packed = replace(round_weights(weight, torch.int8), input_scale=static)
        return packed, scheme(WeightKind.INT8, channel, Activations.STATIC)
    if name == "fp8 blocks":
        values, scales = round_rows(weight, FP8, 128)
        of = scheme(WeightKind.FP8, Granularity.BLOCK, Activations.TOKEN_GROUP, 128)
        return PackedWeights(values.contiguous(), scales, 128), of
    if name == "fp8 weights alone":
        return round_weights(weight, FP8), scheme(WeightKind.FP8, channel, Activations.NONE)
    if name == "fp8 static":
        packed = replace(round_weights(weight, FP8), input_scale=static)
        return packed, scheme(WeightKind.FP8, channel, Activations.STATIC)
    return round_weights(weight, FP8), scheme(WeightKind.FP8, channel, Activations.TOKEN)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "fp8 static",
        "fp8 blocks",
        "fp8 weights alone",
        "int8",
        "int8 rotated",
        "int8 static",
        "int4",
        "int4 in an order",
    ],
)
def test_equals_the_definition(name: str, has_bias: bool, device: torch.device) -> None:
    weights, of = made(name)
    bias = torch.nn.Parameter(torch.randn(NUM_OUT, dtype=DTYPE), requires_grad=False) if has_bias else None
    plain = QuantisedLinear(weights, bias, of).to(device)
    layer = card_linear(plain)
    assert isinstance(layer, Int4CardLinear if of.kind is WeightKind.INT4 else QuantisedCardLinear)
    assert layer.scales.data_ptr() == plain.scales.data_ptr()
    assert torch.equal(layer.weights.values.view(torch.uint8), plain.values.view(torch.uint8))
    assert card_linear(layer) is None, "a second time there is nothing to replace"
    for num_rows in (1, 5, 64, 70):
        x = torch.randn(1, num_rows, NUM_IN, device=device).to(DTYPE)
        out = layer(x)
        assert out.shape == (1, num_rows, NUM_OUT)
        assert out.dtype is DTYPE
        assert relative_error(out[0], plain(x.float())[0].double().cpu()) < 2 * TOLERANCE[DTYPE], num_rows
        assert not layer.arrived.any()


def test_a_twin_counts_apart(device: torch.device) -> None:
    weights, of = made("int4")
    layer = card_linear(QuantisedLinear(weights, None, of).to(device))
    assert layer is not None
    before = layer.arrived
    assert count_apart(torch.nn.Sequential(layer)) == 1
    assert layer.arrived is not before


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * torch.cuda.is_available())
@pytest.mark.parametrize(("num_in", "group_size"), [(256, 32), (256, 64), (3072, 128), (160, 160), (96, 96)])
def test_int4_weights_made_numbers_are_those_of_the_definition(
    num_in: int, group_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(5)
    packed = round_weights_int4(torch.randn(37, num_in), group_size)
    assert packed.zeros is not None
    factors = group_factors(packed.scales, packed.zeros)
    found = int4_unpack(words_of(unpack_int4(packed.values)).to(device), factors.to(device), group_size, num_in, dtype)
    assert torch.equal(found.cpu(), dequantised(packed, dtype))


@pytest.mark.parametrize("num_in", [32, 96, 128, 320, 512])
def test_the_order_of_the_card_is_undone(num_in: int) -> None:
    numbers = torch.randint(0, 16, (5, num_in), dtype=torch.uint8)
    words = words_of(numbers)
    assert words.shape == (-(-num_in // 128), 5, 32)
    assert torch.equal(numbers_of(words, num_in), numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_without_their_last_bits_are_rounded_as_whole_ones(dtype: torch.dtype) -> None:
    """Those that lie between two numbers of the type, and right beside the middle of two, more than others."""
    torch.manual_seed(6)
    near = torch.rand(20_000).add(0.01).to(dtype)
    above = (near.view(torch.int16) + 1).view(dtype)
    middle = (near.float() + above.float()) / 2
    beside = [(middle.view(torch.int32) + step).view(torch.float32) for step in (-300, -256, -1, 0, 1, 255, 256, 300)]
    scales = torch.cat([near.float(), torch.rand(20_000) * 1e-3, torch.rand(20_000) * 1e-7, *beside])[:, None]
    zeros = torch.randint(0, 128, scales.shape, dtype=torch.uint8)
    words = group_factors(scales, zeros)
    assert words.shape == (1, len(scales))
    assert torch.equal((words & 255).t(), zeros.int())
    kept = (words & ~255).view(torch.float32).t()
    assert not torch.equal(kept, scales)
    assert torch.equal(kept.to(dtype), scales.to(dtype))


@pytest.mark.parametrize("most_bytes", [SMALLEST_BYTES, 227 * 1024])
@pytest.mark.parametrize("num_rows", [1, 16, 32, 33, 64])
def test_tiles_fit_the_card_and_the_counts_of_a_layer(num_rows: int, most_bytes: int) -> None:
    """A program's memory, one count for each 64 outputs."""
    for num_out, num_in in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 1024), (1024, 3072)):
        for tile, weight_bits, input_bits in (
            (scaled_tile(num_rows, num_out, num_in, most_bytes), 8, 8),
            (int4_tile(num_rows, num_out, num_in), 4, 16),
        ):
            rows = max(16, 1 << (num_rows - 1).bit_length())
            stage = tile.block_k * (tile.block_n * weight_bits + rows * input_bits) // 8
            assert tile.num_stages * stage <= most_bytes, (tile, num_out, num_in)
            assert tile.block_n % 64 == 0
