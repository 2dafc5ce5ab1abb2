"""What pieces of rows' contexts have given, weighed: beside the same in torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")

from replicas.kernels.piece_weighing import weigh_pieces

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("num_rows", [1, 5])
def test_pieces_are_weighed_by_their_log_sum_exp(num_rows: int, device: torch.device) -> None:
    torch.manual_seed(3)
    num_heads, dim = 4, 64
    partial = torch.randn(2 * num_rows, num_heads, dim).to(device)
    lse = torch.randn(2 * num_rows, num_heads).to(device)
    shares = torch.zeros(2 * num_rows + 2, 4, dtype=torch.int32)
    shares[: num_rows + 1, 3] = 2 * torch.arange(num_rows + 1)  # each row in two pieces
    constants = {"HEAD_DIM": dim, "DIM_PADDED": dim, "ROWS_AT": 0, "IS_EARLY": False}
    out = torch.zeros(num_rows, num_heads, dim, device=device)
    weigh_pieces(out, partial, lse, shares.to(device), num_rows, 1, constants)
    weights = torch.softmax(lse.view(num_rows, 2, num_heads) * math.log(2.0), 1)[..., None]
    assert torch.allclose(out, (weights * partial.view(num_rows, 2, num_heads, dim)).sum(1), atol=1e-5)
