"""Products of a few rows against the definition: sizes that no tile divides, bias."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.gemv import gemv
from replicas.kernels.skinny_product import ProductTile, skinny_product
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
    outs = [
        skinny_product(given[0], given[1], given[2], ProductTile(64, 64, 4, 3, num_parts), arrived) for _ in range(2)
    ]
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


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`run` as a CUDA graph; where there is no card, itself."""
    if not torch.cuda.is_available():
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def test_graphs_and_launches_by_hand_share_the_counters_and_see_what_the_kernel_in_front_wrote(
    device: torch.device,
) -> None:
    """Each product's input is the result of the one in front, which is still at work where kernels launch early."""
    num_rounds, width = (100, 2048) if torch.cuda.is_available() else (2, 256)
    generator = torch.Generator().manual_seed(7)
    weights = [(torch.randn(width, width, generator=generator) / width**0.5).half().to(device) for _ in range(6)]
    inputs = [torch.randn(rows, width, generator=generator).half().to(device) for rows in (5, 40)]
    arrived = torch.zeros(width // 64, dtype=torch.int32, device=device)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = skinny_product(x, weight, None, ProductTile(64, 128, 4, 3, 4), arrived)
        return torch.cat([x[0], gemv(x[-1:].contiguous(), weights[0], None)])

    expected = []
    for x in inputs:
        exact = x.double()
        for weight in weights:
            exact = (exact @ weight.double().T).half().double()
        expected.append(torch.cat([exact[0], exact[-1] @ weights[0].double().T]))
    first = [chain(x).clone() for x in inputs]
    for out, reference in zip(first, expected, strict=True):
        assert relative_error(out, reference.cpu()) < 5 * TOLERANCE[torch.float16]
    graphs = [captured(lambda x=x: chain(x)) for x in inputs]  # type: ignore[misc]
    ways = [*graphs, *(lambda x=x: chain(x) for x in inputs)]  # type: ignore[misc]
    for number in range(num_rounds):
        outs = [way().clone() for way in (ways if number % 2 else reversed(ways))]
        for index, out in enumerate(outs if number % 2 else reversed(outs)):
            assert torch.equal(out, first[index % 2]), (number, index)
    assert not arrived.any()
