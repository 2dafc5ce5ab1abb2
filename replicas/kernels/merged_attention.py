"""Attention over all keys, from what it is over each of two parts of them.

A part's result weighs as much as the exponentials of its scores add up to (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_token(
    first, second, first_lse, second_lse, out, num_tokens,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    is_head = heads < NUM_HEADS
    one = tl.load(first_lse + heads * num_tokens + token, mask=is_head, other=0.0)
    other = tl.load(second_lse + heads * num_tokens + token, mask=is_head, other=0.0)
    share = 1.0 / (1.0 + tl.exp(other - one))  # of the first; 0 where the other one is beyond comparison
    places = (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    of_first = tl.load(first + places, mask=mask, other=0.0).to(tl.float32)
    of_second = tl.load(second + places, mask=mask, other=0.0).to(tl.float32)
    merged = of_second + (of_first - of_second) * share[:, None]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=mask)


def merge_attention(
    first: torch.Tensor, second: torch.Tensor, first_lse: torch.Tensor, second_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """first, second, out [T, num_heads, head_dim], contiguous, out of either if you like; first_lse, second_lse
    float32 [num_heads, T], contiguous: natural logarithms of the sums of the exponentials of scaled scores, finite.
    Computes in float32. Mutates out. Does not block."""
    num_tokens, num_heads, head_dim = out.shape
    _merge_token[(num_tokens,)](
        first, second, first_lse, second_lse, out, num_tokens, NUM_HEADS=num_heads,
        HEADS_PADDED=triton.next_power_of_2(num_heads), HEAD_DIM=head_dim,
        DIM_PADDED=triton.next_power_of_2(head_dim), num_warps=8,
    )  # fmt: skip
