"""Products of a few rows against the definition: sizes that no tile divides, bias."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.kernels.gemv import gemv
from replicas.cuda.kernels.skinny_product import skinny_product
from tests.gpu.paged_case import TOLERANCE, relative_error

pytestmark = pytest.mark.interpreted

# The interpreter multiplies bfloat16 as the integers it keeps them in.
DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in"), [(2, 200, 96), (17, 64, 576), (64, 100, 1000), (70, 70, 320)]
)
def test_equals_the_product(
    device: torch.device, dtype: torch.dtype, has_bias: bool, num_rows: int, num_out: int, num_in: int
) -> None:
    x, weight = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    given = [None if t is None else t.to(device) for t in (x, weight, bias)]
    assert given[0] is not None
    assert given[1] is not None
    out = skinny_product(given[0], given[1], given[2], (64, 64, 4, 3))
    assert out.shape == (num_rows, num_out)
    assert relative_error(out, expected) < TOLERANCE[dtype]


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
