"""Paged attention, the seam between transformers' model code and our pool.

transformers calls the function registered here for every layer with that layer's projected and rotated
q, k, v. It writes k and v into the pool and attends over the pool. This file is the PyTorch reference
that runs on CPU; CUDA kernels go behind the same function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from replicas.kv_pool import KvPool
from replicas.step_inputs import ChunkSpan, DecodeGroup, StepInputs

ATTENTION_NAME = "splitserve_paged"

# Arguments that change what attention computes. A model that passes one is not computed right here.
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias")


class UnsupportedAttention(Exception):
    """The model asks for a kind of attention that this does not compute; serving it would give wrong text."""


class PagedStep:
    """One step's view for the attention function: the pool and where this step's tokens go.

    num_calls counts layers served, so that the runner can tell a model that bypasses this function.
    """

    def __init__(self, pool: KvPool, inputs: StepInputs) -> None:
        self.pool = pool
        self.inputs = inputs
        self.num_calls = 0


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedStep,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the pool. Mutates the pool: this step's k and v are written first.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, head_dim].
    Returns [1, num_tokens, num_heads, head_dim] and no weights. attention_mask is ignored: causality
    follows from the step's positions. Raises UnsupportedAttention.
    """
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedAttention(f"layer {module.layer_idx} wants {name}={arguments[name]}")
    paged.num_calls += 1
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = paged.pool.layer_keys(layer), paged.pool.layer_values(layer)
    inputs = paged.inputs
    keys[inputs.write_blocks, inputs.write_offsets] = key[0].transpose(0, 1)
    values[inputs.write_blocks, inputs.write_offsets] = value[0].transpose(0, 1)
    output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for group in inputs.groups:
        output[group.rows] = _attend_rows(query[0][:, group.rows], keys, values, group, scaling)
    for chunk in inputs.chunks:
        span = slice(chunk.start, chunk.start + chunk.length)
        output[span] = _attend_chunk(query[0][:, span], keys, values, chunk, scaling)
    return output.unsqueeze(0), None


def _attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scaling: float
) -> torch.Tensor:
    """query [num_heads, n, head_dim] -> [n, num_heads, head_dim].

    The heads that share a KV head become the queries of one attention over it, so nothing is repeated.
    """
    num_heads, n, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.transpose(0, 1).reshape(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = keys[group.block_table].flatten(1, 2).transpose(1, 2)
    v = values[group.block_table].flatten(1, 2).transpose(1, 2)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scaling)
    return out.reshape(n, num_heads, head_dim)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: ChunkSpan, scaling: float
) -> torch.Tensor:
    """query [num_heads, length, head_dim] -> [length, num_heads, head_dim]."""
    num_heads, length, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    groups = num_heads // num_kv_heads
    grouped = query.reshape(num_kv_heads, groups * length, head_dim)
    k = keys[chunk.block_ids].flatten(0, 1).transpose(0, 1)
    v = values[chunk.block_ids].flatten(0, 1).transpose(0, 1)
    mask = chunk.mask.repeat(groups, 1)
    # A batch dimension of one: without it SDPA takes the slow path for masks.
    out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=scaling)[0]
    return out.reshape(num_heads, length, head_dim).transpose(0, 1)
