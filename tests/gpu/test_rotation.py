"""Norms of heads and rotary positions against transformers' own functions in float64; what comes into the pool."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.kernels.rotary_heads import HeadNorms
from replicas.kernels.rotation import rotate_into_pool
from tests.gpu.paged_case import BLOCK_SIZE, TOLERANCE, paged_case, relative_error

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPSILON = 1e-3


def expected(
    projected: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [T, heads, head_dim] in float64, by the functions of a model's own attention."""
    num_heads, num_kv_heads = heads
    head_dim = cos.shape[1]
    q, k, v = (
        part.double().unflatten(1, (-1, head_dim))
        for part in projected.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], 1)
    )
    if norms:
        q, k = (norm_of(x, weight) for x, weight in ((q, norms.query), (k, norms.key)))
    q, k = apply_rotary_pos_emb(q[None], k[None], cos.double()[None], sin.double()[None], unsqueeze_dim=2)
    return q[0], k[0], v


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = Qwen3RMSNorm(x.shape[-1], EPSILON)
    norm.weight.data = weight.double()
    out: torch.Tensor = norm(x.float()).double()
    return out.detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("copies_value", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (14, 2, 128), (9, 3, 96), (32, 8, 64)])
def test_equals_the_model_s_own_functions(
    device: torch.device,
    dtype: torch.dtype,
    has_norms: bool,
    copies_value: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Two decode rows, then tokens 3 to 8 of one sequence and 15 to 17 of another, with padding between."""
    num_rows, lengths = 2, [20, 5, 9, 18]
    slots = torch.tensor([0, 1] + [2] * 6 + [2, 0] + [3] * 3, dtype=torch.int32)
    positions = torch.tensor([19, 4, 3, 4, 5, 6, 7, 8, -1, -1, 15, 16, 17], dtype=torch.int32)
    generator = torch.Generator().manual_seed(num_heads)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    projected = torch.randn(len(slots), width, generator=generator).to(dtype)
    angles = torch.rand(len(slots), head_dim // 2, generator=generator).repeat(1, 2) * 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query_weight, key_weight = (0.5 + torch.rand(head_dim, generator=generator).to(dtype) for _ in range(2))
    norms = HeadNorms(query_weight, key_weight, EPSILON) if has_norms else None
    case = paged_case(lengths, num_kv_heads, head_dim, dtype, device)
    before = case.kv.clone()
    given = HeadNorms(query_weight.to(device), key_weight.to(device), EPSILON) if has_norms else None
    out = rotate_into_pool(
        projected.to(device), given, cos.to(device), sin.to(device), case.kv, case.table, slots.to(device),
        positions.to(device), num_rows, copies_value=copies_value,
    )  # fmt: skip
    reference = expected(projected, norms, cos, sin, (num_heads, num_kv_heads))
    for ours, exact in zip(out[:2], reference[:2], strict=True):
        assert relative_error(ours, exact) < TOLERANCE[dtype]
    assert torch.equal(out[2].cpu(), reference[2].to(dtype))
    assert out[2].is_contiguous() == copies_value
    written = torch.zeros(before.shape[0], BLOCK_SIZE, dtype=torch.bool, device=device)
    for token in range(num_rows, len(slots)):
        position = int(positions[token])
        if position >= 0:
            block = int(case.table[slots[token], position // BLOCK_SIZE])
            written[block, position % BLOCK_SIZE] = True
            for kind, tensor in enumerate(out[1:]):
                assert torch.equal(case.kv[block, kind, position % BLOCK_SIZE], tensor[token])
    untouched = ~written[:, None, :, None, None].expand_as(before)
    assert torch.equal(case.kv[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))
