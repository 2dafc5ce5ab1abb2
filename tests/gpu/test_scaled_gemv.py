"""Products of one row of fp8 against the definition, and beside those of more rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda import quantised_card_linear
from replicas.cuda.quantised_card_linear import rounded_gate, rounded_product
from replicas.kernels.round_gated import round_gated
from replicas.kernels.scaled_gemv import GemvTile, gated_gemv, is_single, scaled_gemv
from replicas.kernels.scaled_product import scaled_product
from replicas.kernels.skinny_product import ProductTile
from replicas.layers import rounding
from replicas.layers.packed_weights import FP8
from tests.gpu.paged_case import TOLERANCE, relative_error
from tests.gpu.test_quantised_products import DTYPES, arrived_of

pytestmark = pytest.mark.interpreted

TILES = [GemvTile(2, 1024, 2), GemvTile(2, 128, 4), GemvTile(4, 512, 4), GemvTile(8, 256, 8), GemvTile(1, 1024, 4)]


def made(num_rows: int, num_out: int, num_in: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows, their scales, weights and theirs."""
    torch.manual_seed(5)
    both = [rounding.round_rows(torch.randn(size, num_in), FP8, num_in) for size in (num_rows, num_out)]
    return tuple(part.contiguous().to(device) for pair in both for part in pair)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(200, 1024), (16, 3072), (64, 4096), (8, 14336)])
def test_products_of_one_row(
    device: torch.device, num_out: int, num_in: int, dtype: torch.dtype, has_bias: bool, tile: GemvTile
) -> None:
    x, x_scales, weight, scales = made(1, num_out, num_in, device)
    bias = torch.randn(num_out).to(dtype).to(device) if has_bias else None
    expected = (x.cpu().double() * x_scales.cpu().double()) @ (weight.cpu().double() * scales.cpu().double()).T
    expected += 0.0 if bias is None else bias.cpu().double()
    out = scaled_gemv(x, x_scales, weight, scales, bias, dtype, None, tile)
    assert out.dtype is dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    onto = (100 * torch.randn(1, num_out)).to(dtype).to(device)
    assert torch.equal(scaled_gemv(x, x_scales, weight, scales, bias, dtype, onto, tile), onto + out)


@pytest.mark.parametrize("tile", TILES[:3])
def test_each_weight_meets_its_input(device: torch.device, tile: GemvTile) -> None:
    """One that is not zero at a time, inputs and scales that neighbours do not have; sums are exact."""
    num_in = 1024
    x = (torch.arange(num_in) % 15 + 1.0).to(FP8)[None]
    scales = torch.exp2(torch.arange(num_in) % 5.0)[:, None]
    of_x = torch.full((1, 1), 0.5, device=device)
    weight = torch.eye(num_in).to(FP8)
    out = scaled_gemv(x.to(device), of_x, weight.to(device), scales.to(device), None, DTYPES[0], None, tile)
    assert torch.equal(out.cpu().float(), x.float() * scales.T * 0.5)


def test_the_largest_numbers_are_multiplied_and_the_smallest_are_not_lost(device: torch.device) -> None:
    """448 times 448 is more than float16 has, 2^-9 times 2^-9 less."""
    x = torch.full((1, 1024), 448.0)
    x[0, 512:] = 2.0**-9
    weight, ones = torch.zeros(4, 1024), torch.ones(4, 1, device=device)
    weight[0, :512], weight[1, 512:], weight[2, :512] = 448.0, 2.0**-9, -448.0
    out = scaled_gemv(x.to(FP8).to(device), ones[:1], weight.to(FP8).to(device), ones, None, torch.float32)
    assert out.tolist() == [[512 * 448.0**2, 512 * 2.0**-18, -512 * 448.0**2, 0.0]]


@pytest.mark.parametrize("tile", [GemvTile(8, 1024, 4), GemvTile(4, 1024, 8), GemvTile(16, 256, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_that_of_its_product(
    device: torch.device, dtype: torch.dtype, has_bias: bool, tile: GemvTile
) -> None:
    x, x_scales, weight, scales = made(1, 192, 1024, device)
    bias = torch.randn(192).to(dtype).to(device) if has_bias else None
    product = scaled_gemv(x, x_scales, weight, scales, bias, dtype)
    gate, up = product.cpu().float().chunk(2, 1)
    numbers, most = gated_gemv(x, x_scales, weight, scales, bias, dtype, tile)
    wanted = torch.nn.functional.silu(gate) * up
    assert relative_error(numbers, wanted.double()) < TOLERANCE[dtype]
    assert torch.equal(most[0], numbers[0].float().abs().view(most.shape[1], -1).amax(1))


@pytest.mark.parametrize("num_out", [192, 196])
def test_a_layer_of_one_row_is_that_of_more(
    device: torch.device, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row by itself, by the kernels here, and among others, by those of the matrix units."""
    dtype = DTYPES[-1]
    x, x_scales, weight, scales = made(3, num_out, 1024, device)
    used: list[str] = []
    for name in ("scaled_gemv", "gated_gemv"):
        kernel = getattr(quantised_card_linear, name)
        monkeypatch.setattr(
            quantised_card_linear, name, lambda *given, name=name, kernel=kernel: used.append(name) or kernel(*given)
        )
    given = (weight, scales, None)
    onto = torch.randn(3, num_out).to(dtype).to(device)
    arrived = arrived_of(num_out, device)
    all_rows = rounded_product(x, x_scales, *given, onto, arrived, 1024, dtype)
    gates, of_gates = rounded_gate(x, x_scales, *given, arrived, 1024, dtype, FP8)
    assert not used
    for row in range(3):
        one = slice(row, row + 1)
        alone = rounded_product(x[one], x_scales[one], *given, onto[one], arrived, 1024, dtype)
        assert relative_error(alone, all_rows[one].double().cpu()) < TOLERANCE[dtype]
        gate, of_gate = rounded_gate(x[one], x_scales[one], *given, arrived, 1024, dtype, FP8)
        found, wanted = gate.float() * of_gate, gates[one].float() * of_gates[one]
        assert relative_error(found, wanted.double().cpu()) < 0.03  # one of 3 bits may be the next
    assert used == ["scaled_gemv", "gated_gemv"] * (3 if num_out == 192 else 0)


def test_only_one_row_of_fp8_with_one_scale_is_single() -> None:
    row, scale, weight, scales = torch.zeros(1, 1024).to(FP8), torch.ones(1, 1), torch.zeros(8, 1024), torch.ones(8, 1)
    assert is_single(row, scale, weight, scales)
    assert not is_single(row.expand(2, -1), scale, weight, scales)
    assert not is_single(row.to(torch.int8), scale, weight, scales)
    assert not is_single(row, torch.ones(1, 2), weight, torch.ones(8, 2))
    assert not is_single(row, scale, weight, torch.ones(8, 2))
    assert not is_single(row, scale, weight[:7], scales[:7])
    assert not is_single(row[:, :96], scale, weight[:, :96], scales)


def test_sums_are_nearer_to_the_truth_than_those_of_the_matrix_units(device: torch.device) -> None:
    """Of products of one sign, whose sum grows."""
    torch.manual_seed(6)
    x, weight = torch.rand(1, 4096).add(0.5).to(FP8), torch.rand(64, 4096).add(0.5).to(FP8)
    ones = torch.ones(64, 1, device=device)
    expected = x.double() @ weight.double().T
    out = scaled_gemv(x.to(device), ones[:1], weight.to(device), ones, None, torch.float32)
    assert relative_error(out, expected) < 1e-6
    tile = ProductTile(64, 256, 4, 3, 1)
    given = (x.to(device), ones[:1], weight.to(device), ones, 4096, None, tile, arrived_of(64, device), torch.float32)
    assert relative_error(out, expected) <= relative_error(scaled_product(*given), expected)


def test_the_gate_is_rounded_as_by_one_kernel(device: torch.device) -> None:
    dtype = DTYPES[-1]
    x, x_scales, weight, scales = made(1, 256, 1024, device)
    arrived = arrived_of(256, device)
    values, of_values = rounded_gate(x, x_scales, weight, scales, None, arrived, 1024, dtype, FP8)
    product = rounded_product(x, x_scales, weight, scales, None, None, arrived, 1024, dtype)
    wanted, wanted_scales = round_gated(product, FP8)
    assert torch.equal(of_values, wanted_scales)
    assert torch.equal(values.float(), wanted.float())
