"""Attention of a chunk behind many earlier tokens of its sequence, by a library: over those, over itself, then merged.

A library's kernel is half as fast again as ours over the pool, but wants keys in a row, and puts a causal mask's corner
at the first key. So the earlier keys are copied out of their blocks and attended without a mask, the chunk's own with
one, and both results are merged by their log-sum-exps.
"""

from __future__ import annotations

import torch

from replicas.kernels.earlier_keys import earlier_keys
from replicas.kernels.merged_attention import merge_attention


def attend_behind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    slot: torch.Tensor,
    chunk: torch.Tensor,
    num_earlier: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of one chunk that has exactly num_earlier > 0 tokens in front of it, which are in the pool.

    query, out [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], as the pool stores them; kv, table,
    slot, chunk as in `earlier_keys`. What lies behind the chunk's length is padding, and so are its results. Mutates
    out. Does not wait for the device. Raises RuntimeError where the library can't do it.
    """
    query = query.contiguous()
    keys, values = earlier_keys(kv, table, slot, chunk, num_earlier, query.dtype)
    over_earlier, earlier_lse = library_attention_of(query, keys, values, scale, is_causal=False)
    over_itself, own_lse = library_attention_of(query, key.contiguous(), value.contiguous(), scale, is_causal=True)
    merge_attention(over_earlier, over_itself, earlier_lse, own_lse, out)


def library_attention_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by cuDNN of one sequence, contiguous tensors [tokens, heads, head_dim], fewer heads of keys or as many.

    Its results [T, num_heads, head_dim] and, float32 [num_heads, T], the log-sum-exps of scaled scores. is_causal: the
    first query sees the first key only. Raises RuntimeError where cuDNN has no kernel for it.
    """
    query, key, value = (tensor[None].transpose(1, 2) for tensor in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2)[0].contiguous(), lse.reshape(lse.shape[1:3]).contiguous()
