"""Products of a few rows against the definition: sizes that no tile divides, bias."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.kernels.gemv import gemv
from replicas.cuda.kernels.skinny_product import ProductTile, skinny_product
from tests.gpu.paged_case import TOLERANCE, relative_error

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "num_parts"),
    [(2, 200, 96, 1), (17, 64, 576, 2), (64, 100, 1000, 4), (70, 70, 320, 4), (3, 130, 70, 4), (128, 64, 136, 1)],
)
def test_equals_the_product(
    device: torch.device, dtype: torch.dtype, has_bias: bool, num_rows: int, num_out: int, num_in: int, num_parts: int
) -> None:
    """Parts of the inputs of one length, the last one shorter, and one without any."""
    x, weight = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    given = [None if t is None else t.to(device) for t in (x, weight, bias)]
    assert given[0] is not None
    assert given[1] is not None
    arrived = torch.zeros(-(-num_out // 64), dtype=torch.int32, device=device)
    outs = [skinny_product(given[0], given[1], given[2], ProductTile(64, 64, 4, 3, num_parts), arrived) for _ in "12"]
    assert outs[0].shape == (num_rows, num_out)
    assert relative_error(outs[0], expected) < TOLERANCE[dtype]
    assert torch.equal(outs[0], outs[1])
    assert not arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(5, 96), (3, 1030), (6, 2500), (4, 4100)])
def test_one_row_equals_the_product(
    device: torch.device, dtype: torch.dtype, has_bias: bool, num_out: int, num_in: int
) -> None:
    x, weight = torch.randn(1, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = weight.double() @ x[0].double() + (bias.double() if bias is not None else 0.0)
    out = gemv(x.to(device), weight.to(device), bias if bias is None else bias.to(device))
    assert relative_error(out, expected) < TOLERANCE[dtype]
