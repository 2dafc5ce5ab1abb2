"""What a pool of 8 bits stores becomes the same numbers of another type: all of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
import triton
import triton.language as tl

from replicas.kernels.pool_numbers import as_numbers, is_compiled, pairs_as_numbers
from replicas.stored_numbers import FP8

pytestmark = pytest.mark.interpreted

ON_CARD = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_CARD


@triton.jit
def _convert(stored, out, IS_COMPILED: tl.constexpr) -> None:
    places = tl.arange(0, 1024)
    tl.store(out + places, as_numbers(tl.load(stored + places), out.dtype.element_ty, IS_COMPILED))


@triton.jit
def _convert_pairs(words, out, IS_COMPILED: tl.constexpr) -> None:
    places = tl.arange(0, 1024)
    lower, upper = pairs_as_numbers(tl.load(words + places), IS_COMPILED)
    tl.store(out + 2 * places, lower)
    tl.store(out + 2 * places + 1, upper)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(1024, dtype=torch.int32).to(torch.uint8)
    if not ON_CARD:  # in the interpreter what is no number becomes one
        codes[(codes & 127) == 127] = 0
    stored = codes.view(FP8).to(device)
    out = torch.empty(1024, dtype=dtype, device=device)
    _convert[(1,)](stored, out, IS_COMPILED=is_compiled(device))
    assert torch.equal(out.cpu().nan_to_num(7777.0), codes.view(FP8).to(dtype).nan_to_num(7777.0))
    assert bool(out.isnan().any()) == ON_CARD


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_of_the_type_already_stays(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stored = torch.randn(1024).to(dtype).to(device)
    out = torch.empty_like(stored)
    _convert[(1,)](stored, out, IS_COMPILED=is_compiled(device))
    assert torch.equal(out, stored)


def test_every_number_of_a_pair(device: torch.device) -> None:
    codes = torch.randperm(2048).to(torch.int32).to(torch.uint8)  # each number in either place, beside others
    if not ON_CARD:
        codes[(codes & 127) == 127] = 0
    out = torch.empty(2048, dtype=torch.float16, device=device)
    _convert_pairs[(1,)](codes.view(torch.int16).to(device), out, IS_COMPILED=is_compiled(device))
    assert torch.equal(out.cpu().nan_to_num(7777.0), codes.view(FP8).half().nan_to_num(7777.0))
    assert bool(out.isnan().any()) == ON_CARD
