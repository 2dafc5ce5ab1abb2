"""Paged attention in PyTorch, for the CPU: what transformers' model code calls for every layer, by `attention_seam`.

It is given the layer's projected and rotated q, k, v, writes k and v into the pool and attends over the pool.
CUDA kernels go behind the same seam.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from replicas.layers.attention_seam import refuse_arguments
from replicas.model.paged_context import PagedContext, PagedStep

ATTENTION_NAME = "splitserve_paged"


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedStep,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the pool. Mutates the pool: this step's k and v are written first.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, head_dim].
    Returns [1, num_tokens, num_heads, head_dim] and no weights. Causality follows from the step's
    positions. scaling: None for 1 / sqrt(head_dim). Raises UnsupportedAttention.
    """
    refuse_arguments(module, attention_mask, arguments)
    paged.num_calls += 1
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    by_token = query[0].transpose(0, 1)
    paged.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = torch.empty_like(by_token, memory_format=torch.contiguous_format)
    # Scales of what is stored come in once and not number by number: with the scores, and with the sums of values.
    key_scale, value_scale = paged.layout.scales_of(layer)
    if key_scale != 1.0:
        scaling = key_scale * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    for group, context in zip(paged.inputs.groups, paged.groups, strict=True):
        output[group.rows] = _attend_rows(by_token[group.rows], context, layer, scaling)
    for chunk, context in zip(paged.inputs.chunks, paged.chunks, strict=True):
        span = slice(chunk.start, chunk.start + chunk.length)
        output[span] = _attend_chunk(query[0][:, span], context, layer, scaling)
    if value_scale != 1.0:
        output *= value_scale
    return output.unsqueeze(0), None


def _attend_rows(query: torch.Tensor, context: PagedContext, layer: int, scaling: float | None) -> torch.Tensor:
    """query [n, num_heads, head_dim] -> the same, one query for each of n sequences.

    The heads that share a KV head become the queries of one attention over it, so nothing is repeated.
    """
    n, num_heads, head_dim = query.shape
    keys, values = context.keys_values(layer)
    grouped = query.reshape(n, keys.shape[1], num_heads // keys.shape[1], head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=context.mask(), scale=scaling)
    return out.reshape(n, num_heads, head_dim)


def _attend_chunk(query: torch.Tensor, context: PagedContext, layer: int, scaling: float | None) -> torch.Tensor:
    """query [num_heads, length, head_dim] -> [length, num_heads, head_dim], of one sequence."""
    num_heads, length, head_dim = query.shape
    keys, values = context.keys_values(layer)
    groups = num_heads // keys.shape[1]
    grouped = query.reshape(keys.shape[1], groups * length, head_dim)
    # A batch dimension of one: without it SDPA takes the slow path for masks.
    mask = context.mask(num_repeats=groups)
    out = F.scaled_dot_product_attention(grouped[None], keys, values, attn_mask=mask, scale=scaling)[0]
    return out.reshape(num_heads, length, head_dim).transpose(0, 1)
