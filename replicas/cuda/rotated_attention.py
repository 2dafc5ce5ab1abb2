"""Attention from the joined projection to its output as one operator: norms, rotary positions, pool and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from replicas.cuda.attention import attend_written, scales_of
from replicas.cuda.operators import operator
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels.paged_decode import stands_alone
from replicas.kernels.rotary_heads import HeadNorms, HeadRotation
from replicas.kernels.rotation import rotate_into_pool
from replicas.layers.joined_attention import JoinedAttention


def attend_rotated(
    projected: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor | None,
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
    """projected, cos, sin as in `rotate_into_pool`, kv one layer's view of the pool, kv_scales as of
    `scales_of`, the rest as in CudaStep -> [T, num_heads * head_dim]. Mutates kv."""
    step, launches = CudaStep(block_table, places, chunks, shares, layout), Launches.unpack(layout)
    scales = scales_of(kv_scales)
    norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, epsilon)
    num_kv_heads, head_dim = kv.shape[3:]
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    rotation = None
    if rotates_in_attention(launches, len(projected), num_heads // num_kv_heads, kv.dtype):
        heads = projected.unflatten(1, (-1, head_dim))
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
        rotation = HeadRotation(cos, sin, norms)
    else:
        query, key, value = rotate_into_pool(
            projected, norms, cos, sin, kv, block_table, step.token_slots, step.positions, launches.num_row_tokens,
            copies_value=bool(launches.fresh or launches.num_earlier), scales=scales,
        )  # fmt: skip
    return attend_written(query, key, value, kv, step, launches, scale, scales, rotation).flatten(1)


def rotates_in_attention(launches: Launches, num_tokens: int, group: int, stored: torch.dtype) -> bool:
    """Whether all tokens of a step are rows of one query, which the kernel that attends rotates by itself, if it
    `stands_alone`: one less of a decode step's short kernels. What else a step may have is attended by kernels that
    read keys as they are stored."""
    is_of_rows = launches.num_rows == num_tokens and not launches.num_queries
    return is_of_rows and stands_alone(group, stored)


def _shape_of_attended(projected: torch.Tensor, kv: torch.Tensor, *others: object) -> torch.Tensor:
    num_kv_heads, head_dim = kv.shape[3:]
    return projected.new_empty(projected.shape[0], projected.shape[1] - 2 * num_kv_heads * head_dim)


# That kv is written is not declared, as in `cuda_attention`.
_attend_rotated = operator(attend_rotated, _shape_of_attended)


class RotatedAttention(JoinedAttention):
    """A known attention whose module has its view of the pool: after `bind_attention`."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        for name in ("paged_kv", "kv_scales"):
            self.register_buffer(name, getattr(attention, name), persistent=False)

    def attend(self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: CudaStep) -> torch.Tensor:
        module: Any = self
        norm = getattr(module, "q_norm", None)
        out: torch.Tensor = _attend_rotated(
            projected,
            module.paged_kv,
            module.kv_scales,
            norm.weight if norm is not None else None,
            module.k_norm.weight if norm is not None else None,
            norm.variance_epsilon if norm is not None else 0.0,
            cos,
            sin,
            paged.block_table,
            paged.places,
            paged.chunks,
            paged.shares,
            paged.layout,
            module.scaling,
        )
        return out
