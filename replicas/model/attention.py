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

from replicas.model.paged_context import PagedContext, PagedStep

ATTENTION_NAME = "splitserve_paged"

# Arguments that do not change what attention computes. Any other may (a window, sinks, soft-capping, a bias): a model
# that passes one is refused.
_HARMLESS_ARGUMENTS = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "use_cache"}
)  # fmt: skip


class UnsupportedAttention(Exception):
    """The model asks for a kind of attention that this does not compute; serving it would give wrong text."""


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def refuse_arguments(module: nn.Module, attention_mask: torch.Tensor | None, arguments: dict[str, object]) -> None:
    """Raise UnsupportedAttention when the model passes one that we do not know to be without effect.

    transformers makes no mask for an attention that it does not know, so a mask is one that the model made itself.
    """
    if attention_mask is not None:
        raise UnsupportedAttention(f"layer {module.layer_idx} makes an attention mask of its own")
    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        raise UnsupportedAttention(f"layer {module.layer_idx} attends to later tokens too")
    for name, value in arguments.items():
        if value is not None and name not in _HARMLESS_ARGUMENTS:
            raise UnsupportedAttention(f"layer {module.layer_idx} wants {name}={value}")


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
    for group, context in zip(paged.inputs.groups, paged.groups, strict=True):
        output[group.rows] = _attend_rows(by_token[group.rows], context, layer, scaling)
    for chunk, context in zip(paged.inputs.chunks, paged.chunks, strict=True):
        span = slice(chunk.start, chunk.start + chunk.length)
        output[span] = _attend_chunk(query[0][:, span], context, layer, scaling)
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
