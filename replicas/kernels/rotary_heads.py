"""Heads with norms and rotary positions: what `rotate_into_pool` and `paged_decode` both compute, to the same bits.

Rotary embedding: Su et al., "RoFormer", 2021, in the halves that transformers' Llama uses. Norms of the heads: RMSNorm
(Zhang and Sennrich, 2019) over one head's dimensions, as Qwen3 has them.

A key is written by the one kernel in steps of rows only, by the other beside prompts, and is the same. So nothing is
left to the compiler that it might do here so and there otherwise: where a product and a sum are rounded once, it is
written, and squares are made by an instruction that no addition can be drawn into (left to itself, the compiler would
round them only with their sum). The order of a norm's sum is that in which the compiler lays heads among threads: it
lays as many heads of one size alike, for one type of pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

HEADS_AT_ONCE = 16


class HeadNorms(NamedTuple):
    """RMSNorm of each head's dimensions. query, key: weights [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


class HeadRotation(NamedTuple):
    """What is to be done to projected q and k of T tokens. cos, sin: [T, head_dim], contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: HeadNorms | None

    def arguments(self) -> tuple[torch.Tensor | float, ...]:
        """As kernels take them: cos, sin, weights of queries and keys, epsilon. Without norms the weights are tensors
        that are not looked at."""
        query_weight, key_weight, epsilon = self.norms or (self.cos, self.cos, 0.0)
        return self.cos, self.sin, query_weight, key_weight, epsilon


def refuse_partial(cos: torch.Tensor, num_tokens: int, head_dim: int) -> None:
    """Raises ValueError where positions rotate only a part of a head."""
    if cos.shape != (num_tokens, head_dim):
        raise ValueError(f"rotary positions of {tuple(cos.shape)} for {num_tokens} tokens with heads of {head_dim}")


@triton.jit
def rotated_heads(
    rows, mask, dims, is_query, cos, sin, query_weight, key_weight, epsilon,
    HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """-> a token's heads as they are given, and rotated: both [heads, dims], of the given type. Computes in float32.

    rows: pointers to heads, [heads, 1], as many in either kernel; mask: [heads, dims], of what there is; cos, sin:
    pointers to the token's; is_query: [heads], which have the norm of queries, others that of keys.
    """
    half: tl.constexpr = HEAD_DIM // 2
    is_first = (dims < half)[None, :]
    # What is the same for all heads is read for each: spread among threads, each would be waited for before the next.
    own = tl.broadcast_to(dims[None, :], mask.shape)
    partners = tl.broadcast_to(tl.where(dims < half, dims + half, dims - half)[None, :], mask.shape)
    given = tl.load(rows + own, mask=mask, other=0.0)
    x, partner = given.to(tl.float32), tl.load(rows + partners, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + own, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + own, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weights = tl.where(is_query[:, None], query_weight, key_weight)
        weight = tl.load(weights + own, mask=mask, other=0.0).to(tl.float32)
        partner_weight = tl.load(weights + partners, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.fma(x, x, 0.0), 1) / HEAD_DIM + epsilon)[:, None]
        x *= scale * weight
        partner *= scale * partner_weight
    return given, tl.fma(x, c, partner * tl.where(is_first, -s, s)).to(given.dtype)
