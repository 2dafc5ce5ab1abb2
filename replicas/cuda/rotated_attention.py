"""Attention modules that hand their joined projection to one operator: norms, rotary positions, pool and attention.

Otherwise the compiler makes the step between projections and attention, of what transformers' code says. That stays the
way of every module that is not known here to the letter.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from replicas.cuda.attention import attend_written
from replicas.cuda.operators import operator
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels.rotation import HeadNorms, rotate_into_pool
from replicas.model.fused_projections import ProjectionPart

logger = logging.getLogger(__name__)

# Of transformers: their forward passes are the same but for the norms, and for a sliding window, with which they are
# left alone.
_KNOWN = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")


def attend_rotated(
    projected: torch.Tensor,
    kv: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_table: torch.Tensor,
    places: torch.Tensor,
    chunks: torch.Tensor,
    shares: torch.Tensor,
    layout: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """projected, cos, sin as in `rotate_into_pool`, kv one layer's view of the pool, the rest as in CudaStep ->
    [T, num_heads * head_dim]. Mutates kv."""
    step, launches = CudaStep(block_table, places, chunks, shares, layout), Launches.unpack(layout)
    norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, epsilon)
    query, key, value = rotate_into_pool(
        projected, norms, cos, sin, kv, block_table, step.token_slots, step.positions, launches.num_rows,
        copies_value=bool(launches.fresh),
    )  # fmt: skip
    return attend_written(query, key, value, kv, step, launches, scale).flatten(1)


def _shape_of_attended(projected: torch.Tensor, kv: torch.Tensor, *others: object) -> torch.Tensor:
    num_kv_heads, head_dim = kv.shape[3:]
    return projected.new_empty(projected.shape[0], projected.shape[1] - 2 * num_kv_heads * head_dim)


# That kv is written is not declared, as in `cuda_attention`.
_attend_rotated = operator(attend_rotated, _shape_of_attended)


class RotatedAttention(nn.Module):
    """In front of a known attention class, whose attributes it uses. Without a CudaStep it is that class."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [1, T, hidden_size], position_embeddings: cos and sin [1, T, head_dim] -> the first's shape."""
        paged: CudaStep | None = named.get("paged")
        if paged is None:
            result: tuple[torch.Tensor, None] = super().forward(hidden_states, position_embeddings, *arguments, **named)
            return result
        module: Any = self
        norm = getattr(module, "q_norm", None)
        cos, sin = position_embeddings
        out = _attend_rotated(
            module.q_proj.joined.product(hidden_states)[0],
            module.paged_kv,
            norm.weight if norm is not None else None,
            module.k_norm.weight if norm is not None else None,
            norm.variance_epsilon if norm is not None else 0.0,
            cos[0],
            sin[0],
            paged.block_table,
            paged.places,
            paged.chunks,
            paged.shares,
            paged.layout,
            module.scaling,
        )
        return module.o_proj(out[None]), None


def use_rotation(model: nn.Module) -> int:
    """Change the attention modules that are known, after `bind_attention`; how many. Mutates their classes only."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    count = 0
    for module in model.modules():
        if _is_known(module):
            kind = type(module)
            if kind not in classes:
                classes[kind] = type(f"Rotated{kind.__name__}", (RotatedAttention, kind), {})
            module.__class__ = classes[kind]
            count += 1
    logger.info("rotary positions in one kernel", extra={"event": "rotation_fused", "layers": count})
    return count


def _is_known(module: nn.Module) -> bool:
    """Whether the module computes what RotatedAttention does."""
    kind, made_of = type(module), [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("transformers.models."):
        return False
    if not all(isinstance(part, ProjectionPart) for part in made_of):
        return False
    config: Any = getattr(module, "config", None)
    has_window = any(getattr(owner, "sliding_window", None) is not None for owner in (module, config))
    return not has_window and (getattr(module, "q_norm", None) is None) == (getattr(module, "k_norm", None) is None)
