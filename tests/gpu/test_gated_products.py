"""Products of few rows that make an MLP's gate, or add the residual: those of the plain kernels, and torch's gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.gated_rows import gated_rows
from replicas.kernels.gemv import gemv
from replicas.kernels.int4_gemv import Int4GemvTile, int4_gemv
from replicas.kernels.int4_product import int4_product
from replicas.kernels.skinny_product import ProductTile, skinny_product
from tests.gpu.paged_case import TOLERANCE, relative_error
from tests.gpu.test_quantised_products import DTYPES, Int4Case, arrived_of, int4_case

pytestmark = pytest.mark.interpreted

# Called with onto and is_gated, by name.
Product = Callable[..., torch.Tensor]


def numbers(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Few digits, so that sums of products are exact, in whatever order."""
    return (torch.randint(-9, 10, (num_rows, num_columns)) / 16).to(dtype).to(device)


def check(product: Product, num_rows: int, num_out: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both of what is made within a product, beside what is made behind it."""
    gates = product(is_gated=True).view(num_rows, -1)
    rows = product().view(num_rows, num_out)
    assert gates.dtype is dtype
    assert torch.equal(gates, gated_rows(rows)), "bit for bit the same kernel's gate of the product"
    gate, up = rows.double().cpu().chunk(2, 1)
    assert relative_error(gates, F.silu(gate) * up) < TOLERANCE[dtype]
    check_sum(product, num_rows, num_out, dtype, device)


def check_sum(product: Product, num_rows: int, num_out: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = product().view(num_rows, num_out)
    onto = (100 * torch.randn(num_rows, num_out)).to(dtype).to(device)
    given = onto.clone()
    assert torch.equal(product(onto=onto).view(num_rows, num_out), onto + rows)
    assert torch.equal(onto, given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_out"), [(1, 14), (3, 2 * 1024), (70, 2 * 1030)])
def test_gates_of_rows_are_torchs(device: torch.device, num_rows: int, num_out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (4 * torch.randn(num_rows, num_out + 3)).to(dtype).to(device)[:, :num_out]
    x[0, 0], x[0, 1], x[0, 2] = 80.0, -90.0, 0.0
    gate, up = x.float().cpu().chunk(2, 1)
    out = gated_rows(x)
    assert out.shape == (num_rows, num_out // 2)
    assert relative_error(out, (F.silu(gate) * up).double()) < TOLERANCE[dtype]
    assert gated_rows(x[:0]).shape == (0, num_out // 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_out", "num_in", "tile"),
    [(6, 96, None), (10, 2500, None), (64, 1024, (2, 1024, 4)), (90, 600, (8, 512, 4)), (8, 9000, None)],
)
def test_of_one_row(
    device: torch.device, num_out: int, num_in: int, tile: tuple[int, int, int] | None, has_bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(2)
    x, weight = numbers(1, num_in, dtype, device), numbers(num_out, num_in, dtype, device)
    bias = torch.randn(num_out).to(dtype).to(device) if has_bias else None
    check(lambda **named: gemv(x, weight, bias, tile, **named), 1, num_out, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_parts"),
    [(1, 64, 96, 1), (2, 200, 96, 1), (16, 128, 576, 2), (33, 100, 1000, 4), (64, 256, 320, 1), (5, 70, 70, 4)],
)
def test_of_few_rows(
    device: torch.device, num_rows: int, num_out: int, num_in: int, num_parts: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Whole tiles and others, parts of the inputs, one of them without any."""
    torch.manual_seed(3)
    x, weight = numbers(num_rows, num_in, dtype, device), numbers(num_out, num_in, dtype, device)
    bias = torch.randn(num_out).to(dtype).to(device) if has_bias else None
    arrived = arrived_of(num_out, device)
    tile = ProductTile(64, 64, 4, 3, num_parts)
    check(lambda **named: skinny_product(x, weight, bias, tile, arrived, **named), num_rows, num_out, dtype, device)
    assert not arrived.any()


def exact_case(
    num_rows: int, num_out: int, num_in: int, group_size: int, dtype: torch.dtype, has_bias: bool
) -> Int4Case:
    """As `int4_case`, of rows and scales of few digits, so that sums are exact."""
    case = int4_case(num_rows, num_out, num_in, group_size, dtype, has_bias)
    scales = torch.exp2(torch.randint(-6, -3, case.scales.shape).float()).half()
    return case._replace(x=numbers(num_rows, num_in, dtype, torch.device("cpu")), scales=scales)


# In the interpreter that of one row multiplies bfloat16 too, but rounds it otherwise than torch.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_out", "num_in", "group_size", "tile"),
    [
        (64, 512, 128, None), (96, 160, 32, Int4GemvTile(4, 4, 1)), (90, 768, 64, Int4GemvTile(2, 2, 2)),
        (128, 1024, 128, Int4GemvTile(8, 4, 1)), (26, 192, 96, Int4GemvTile(4, 1, 8)),
    ],
)  # fmt: skip
def test_of_one_row_of_4_bits(
    device: torch.device, num_out: int, num_in: int, group_size: int, tile: Int4GemvTile | None, has_bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = exact_case(1, num_out, num_in, group_size, dtype, has_bias)
    x, weights, bias = case.x.to(device), case.weights_on(device), case.bias_on(device)
    check(lambda **named: int4_gemv(x, *weights, group_size, bias, tile, **named), 1, num_out, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "group_size", "num_parts"),
    [(2, 256, 512, 128, 4), (16, 90, 192, 96, 1), (33, 128, 320, 64, 2), (64, 200, 576, 64, 4), (1, 128, 256, 256, 1)],
)
def test_of_few_rows_of_4_bits(
    device: torch.device, num_rows: int, num_out: int, num_in: int, group_size: int, num_parts: int, has_bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = exact_case(num_rows, num_out, num_in, group_size, dtype, has_bias)
    x, weights, bias = case.x.to(device), case.weights_on(device), case.bias_on(device)
    arrived, tile = arrived_of(num_out, device), ProductTile(128, 128, 4, 3, num_parts)

    def product(**named: Any) -> torch.Tensor:
        return int4_product(x, *weights, group_size, bias, tile, arrived, **named)

    check_sum(product, num_rows, num_out, dtype, device)
    assert not arrived.any()
