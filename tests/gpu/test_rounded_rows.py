"""Rows rounded to 8 bits, by themselves and by the kernels that make them: bit for bit what the definition gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.round_gated import round_gated
from replicas.kernels.round_known import round_known
from replicas.kernels.round_normed import round_normed
from replicas.kernels.round_rows import MOST_AT_ONCE, round_rows
from replicas.kernels.scaled_product import gated_product, is_gated_tile, scaled_product
from replicas.kernels.skinny_product import ProductTile
from replicas.layers import rounding
from replicas.layers.packed_weights import FP8

pytestmark = pytest.mark.interpreted

KINDS = [FP8, torch.int8]
# The interpreter cuts what it makes bfloat16, where a card rounds it.
DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
DIGITS = {torch.float16: 1024, torch.bfloat16: 128}


def assert_rounded(found: tuple[torch.Tensor, torch.Tensor], numbers: torch.Tensor, kind: torch.dtype) -> None:
    """found: what the definition makes of these."""
    values, scales = rounding.round_rows(numbers.cpu(), kind, numbers.shape[1])
    assert torch.equal(found[1].cpu(), scales)
    unlike = found[0].cpu().float() != values.float()
    assert not unlike.any(), (numbers.cpu()[unlike][:5], found[0].cpu()[unlike][:5], values[unlike][:5])


def each_below_each(dtype: torch.dtype, every: int, power: int) -> torch.Tensor:
    """A row for each largest number of these digits (every so many), in it all numbers down to a millionth of it."""
    digits = 1.0 + torch.arange(DIGITS[dtype]) / DIGITS[dtype]
    below = (digits[None, :] * 2.0 ** -torch.arange(20)[:, None]).flatten()
    largest = digits[::every, None]
    rows = torch.where(below <= largest, below, 0.0)
    return (torch.cat([largest, rows, -rows], 1) * 2.0**power).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "every", "power"),
    [
        (torch.bfloat16, 1, 0),
        (torch.bfloat16, 16, 126),
        (torch.bfloat16, 16, -59),
        (torch.bfloat16, 16, -106),
        # Of these most have fewer digits: the interpreter does not read them.
        *[(torch.bfloat16, 16, -126)] * torch.cuda.is_available(),
        (torch.float16, 32, 0),
        (torch.float16, 32, -14),
        pytest.param(torch.float16, 1, 0, marks=pytest.mark.slow),
    ],
)
def test_every_number_below_every_largest_one(
    kind: torch.dtype, dtype: torch.dtype, every: int, power: int, device: torch.device
) -> None:
    """A quotient that is computed by multiplications falls on the same side of every border."""
    x = each_below_each(dtype, every, power)
    assert_rounded(round_rows(x.to(device), kind, x.shape[1]), x, kind)


def of_one_size(num_rows: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in each row, in another order: eighths whose squares have an exact sum."""
    torch.manual_seed(6)
    numbers = (torch.randn(num_in) * 8).round().clamp(-31, 31) / 8
    return torch.stack([numbers[torch.randperm(num_in)] for _ in range(num_rows)]).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [256, 1000])
@pytest.mark.parametrize("has_added", [False, True])
def test_a_norm_s_rows_are_rounded_as_behind_it(
    kind: torch.dtype, dtype: torch.dtype, num_in: int, has_added: bool, device: torch.device
) -> None:
    """Where the mean of squares is exact, whatever the order of its sum, and so is the root."""
    sums = of_one_size(5, num_in, dtype)
    sums[3] = 0.0
    mean = sums[0].float().square().mean()
    epsilon = float(4.0 - mean)
    weight = (1 + torch.rand(num_in)).to(dtype)
    added = (torch.randint(-8, 9, sums.shape) / 8).to(dtype) if has_added else None
    x = sums if added is None else sums - added
    of_zeros = torch.zeros(5, 1)
    of_zeros[3] = float(mean)  # a row of zeros stays one, whatever it is multiplied by
    normed = (sums.float() * torch.rsqrt(torch.tensor(4.0)) * weight.float()).to(dtype)
    total, *found = round_normed(
        x.to(device), None if added is None else added.to(device), weight.to(device), epsilon, kind
    )
    assert total.shape == (0 if added is None else 5, num_in)
    if added is not None:
        assert torch.equal(total.cpu(), sums)
    if num_in == 256:  # of 1,000 the mean is no number of 24 bits
        assert_rounded((found[0], found[1]), normed, kind)
    near = found[0].cpu().float() * found[1].cpu()
    step = normed.float().abs() / (16 if kind is FP8 else 1e9) + normed.float().abs().amax(1, keepdim=True) / 250
    assert ((near - normed.float()).abs() <= step * 1.02).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_random_rows_is_near_the_model_s(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(7)
    x, added, weight = torch.randn(4, 300).to(dtype), torch.randn(4, 300).to(dtype), torch.randn(300).to(dtype)
    total, values, scales = round_normed(x.to(device), added.to(device), weight.to(device), 1e-5, FP8)
    sums = x.float() + added.float()
    assert torch.equal(total.cpu(), sums.to(dtype))
    normed = torch.nn.functional.rms_norm(sums, (300,), weight.float(), 1e-5).to(dtype)
    wanted, wanted_scales = rounding.round_rows(normed, FP8, 300)
    assert torch.allclose(scales.cpu(), wanted_scales, rtol=2.0**-7)
    # One unit in the last place of a norm may be one of a rounded number, here and there; of a row's largest, of many.
    assert ((values.cpu().float() != wanted.float()).float().mean(1) < 0.1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [256, 1000])
def test_a_gate_s_rows_are_rounded_as_behind_it(
    kind: torch.dtype, dtype: torch.dtype, num_in: int, device: torch.device
) -> None:
    """Of gates whose silu has no digits that depend on how it is computed: itself, or half of itself, or nothing."""
    torch.manual_seed(8)
    gate = torch.randint(30, 60, (4, num_in)).float()
    gate[:, ::3], gate[2], gate[1, 1::3] = 0.0, 0.0, -300.0
    up = torch.randn(4, num_in).to(dtype)
    made = (torch.where(gate < 0, 0.0, gate) * up.float()).to(dtype)
    found = round_gated(torch.cat([gate.to(dtype), up], 1).to(device), kind)
    assert_rounded(found, made, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_of_random_rows_is_near_the_model_s(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(9)
    x = torch.randn(4, 600).to(dtype)
    values, scales = round_gated(x.to(device), FP8)
    gate, up = x.float().chunk(2, 1)
    wanted, wanted_scales = rounding.round_rows((torch.nn.functional.silu(gate) * up).to(dtype), FP8, 300)
    assert torch.allclose(scales.cpu(), wanted_scales, rtol=2.0**-7)
    assert ((values.cpu().float() != wanted.float()).float().mean(1) < 0.1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_in", [256, 5000])
def test_rows_of_known_largest_numbers(kind: torch.dtype, num_in: int, device: torch.device) -> None:
    torch.manual_seed(10)
    x = torch.randn(3, num_in).to(DTYPES[-1])
    x[1] = 0.0
    parts = torch.stack([part.abs().amax(1) for part in x.float().chunk(7, 1)], 1)
    assert_rounded(round_known(x.to(device), parts.to(device), kind), x, kind)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_gate_behind_its_product_is_that_of_the_product(
    kind: torch.dtype, num_rows: int, has_bias: bool, device: torch.device
) -> None:
    num_out, num_in, tile, dtype = 256, 192, ProductTile(64, 128, 4, 3, 1), DTYPES[-1]
    torch.manual_seed(11)
    x, x_scales = (part.to(device) for part in rounding.round_rows(torch.randn(num_rows, num_in), kind, num_in))
    weight, scales = (part.to(device) for part in rounding.round_rows(torch.randn(num_out, num_in), kind, num_in))
    bias = torch.randn(num_out).to(dtype).to(device) if has_bias else None
    assert is_gated_tile(tile, scales)
    assert not is_gated_tile(tile._replace(num_parts=2), scales)
    assert not is_gated_tile(tile._replace(block_n=512), scales)
    arrived = torch.zeros(num_out // 64, dtype=torch.int32, device=device)
    product = scaled_product(x, x_scales, weight, scales, num_in, bias, tile, arrived, dtype)
    numbers, most = gated_product(x, x_scales, weight, scales, bias, tile, dtype)
    assert numbers.shape == (num_rows, num_out // 2)
    assert torch.equal(most.amax(1), numbers.abs().amax(1).float())
    wanted, found = round_gated(product, FP8), round_known(numbers, most, FP8)
    assert torch.equal(found[0].float(), wanted[0].float())
    assert torch.equal(found[1], wanted[1])


def test_a_row_that_no_program_holds_is_refused(device: torch.device) -> None:
    x = torch.zeros(1, 2 * MOST_AT_ONCE + 2, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="32769 numbers"):
        round_gated(x, FP8)
    with pytest.raises(ValueError, match="numbers: a program holds 32768"):
        round_normed(x, None, x[0], 1e-5, FP8)
