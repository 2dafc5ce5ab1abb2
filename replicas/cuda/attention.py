"""Paged attention on CUDA, behind the same seam as `replicas.model.attention`: one opaque operator over the pool.

Each attention module holds its own layer's view of the pool, so that one compiled layer serves all of them. This file
is imported only where there is a card: the kernels need triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from replicas.cuda.attention_behind import attend_behind
from replicas.cuda.operators import operator
from replicas.cuda.step import CudaStep, Launches
from replicas.kernels.kv_write import write_kv
from replicas.kernels.paged_decode import RowQueries, paged_decode
from replicas.kernels.paged_prefill import paged_prefill
from replicas.kernels.rotary_heads import HeadRotation
from replicas.kv.kv_pool import KvPool
from replicas.layers.attention_seam import refuse_arguments, use_attention
from replicas.model_support import UnsupportedModel
from replicas.stored_numbers import FP8, as_stored

CUDA_ATTENTION_NAME = "splitserve_paged_cuda"
_FP8_CAPABILITY = (8, 9)  # cards from here on convert numbers of 8 bits
_FRESH_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def refuse_numbers(stored: torch.dtype, of_model: torch.dtype, device: torch.device) -> None:
    """Raises UnsupportedModel for a pool whose numbers no kernel reads."""
    if stored is not FP8 and stored is not of_model:
        raise UnsupportedModel(f"a KV pool of {stored}: kernels here want the model's {of_model}, or {FP8}")
    if stored is FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        has = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise UnsupportedModel(f"kv.dtype fp8 needs a card of compute capability 8.9, this one has {has}; set auto")


def bind_attention(model: nn.Module, pool: KvPool) -> None:
    """Register the attention and give every attention module its view of the pool. Mutates the model.

    Raises UnsupportedModel unless there is one attention module for each of the pool's layers.
    """
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    if sorted(int(m.layer_idx) for m in layers) != list(range(pool.layout.num_layers)):  # type: ignore[arg-type]
        raise UnsupportedModel(
            f"{type(model).__name__}: {len(layers)} attention modules for {pool.layout.num_layers} layers"
        )
    for module in layers:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        module.register_buffer("paged_kv", pool.tensor[:, layer], persistent=False)
        scales = torch.tensor(pool.layout.scales_of(layer), dtype=torch.float64) if pool.layout.scales else None
        module.register_buffer("kv_scales", scales, persistent=False)  # on the host, which launches by them
    use_attention(model, CUDA_ATTENTION_NAME, cuda_attention)


def cuda_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged: CudaStep,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """As `replicas.model.attention.paged_attention`. Does not wait for the device. Raises UnsupportedAttention."""
    refuse_arguments(module, attention_mask, arguments)
    out = _attend_over_pool(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        module.paged_kv,
        module.kv_scales,
        paged.block_table,
        paged.places,
        paged.chunks,
        paged.shares,
        paged.layout,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out.unsqueeze(0), None


def library_attention() -> AbstractContextManager[None]:
    """Within it the library's attention of fresh prompts is the fastest there is. Around whole passes: entering it
    takes as long as launching some kernels."""
    return sdpa_kernel(_FRESH_BACKENDS, set_priority=True)


def prepare_library(num_heads: int, pool: KvPool, dtype: torch.dtype, runs: tuple[tuple[int, int], ...]) -> None:
    """Have the library make what it needs for fresh prompts of these (length, count) on this thread. Blocks, some
    65 ms each: cuDNN makes a plan for every shape, and keeps it for one thread only. dtype: the model's."""
    layout = pool.layout
    with library_attention():
        for length, count in runs:
            query, key = (
                torch.zeros(length * count, n, layout.head_dim, dtype=dtype, device=pool.tensor.device)
                for n in (num_heads, layout.num_kv_heads)
            )
            _attend_fresh(query, key, key, count, layout.head_dim**-0.5)


def attend_over_pool(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    kv_scales: torch.Tensor | None,
    block_table: torch.Tensor,
    places: torch.Tensor,
    chunks: torch.Tensor,
    shares: torch.Tensor,
    layout: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], kv one layer's view of the pool,
    kv_scales as of `scales_of`, the rest as in CudaStep -> [T, num_heads, head_dim]. Mutates kv."""
    scales = scales_of(kv_scales)
    if kv.dtype is FP8:
        key, value = (as_stored(new, FP8, by).to(new.dtype) for new, by in zip((key, value), scales, strict=True))
    step, launches = CudaStep(block_table, places, chunks, shares, layout), Launches.unpack(layout)
    rows = launches.num_row_tokens
    if query.shape[0] > rows:
        write_kv(key[rows:], value[rows:], kv, block_table, step.token_slots[rows:], step.positions[rows:])
    return attend_written(query, key, value, kv, step, launches, scale, scales)


def scales_of(kv_scales: torch.Tensor | None) -> tuple[float, float]:
    """Of a layer's keys and values in the pool. kv_scales: float64 [2] on the host; None for 1.0."""
    if kv_scales is None:
        return 1.0, 1.0
    key_scale, value_scale = kv_scales.tolist()
    return key_scale, value_scale


def attend_written(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    step: CudaStep,
    launches: Launches,
    scale: float,
    scales: tuple[float, float],
    rotation: HeadRotation | None = None,
) -> torch.Tensor:
    """As `attend_over_pool`, once k and v are as the pool stores them, and those of all tokens but the rows' are in it.

    Mutates kv: writes the rows'. scales: of keys and values; they come in once, with scores and results. rotation: in a
    step of rows only, what is still to be done to query, key and value (`paged_decode`).
    """
    out = _attend_unscaled(query, key, value, kv, step, launches, scale * scales[0], rotation)
    return out if scales[1] == 1.0 else out.mul_(scales[1])


def _attend_unscaled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    step: CudaStep,
    launches: Launches,
    scale: float,
    rotation: HeadRotation | None,
) -> torch.Tensor:
    token_slots, positions = step.token_slots, step.positions
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rows = launches.num_row_tokens
    if rows:
        paged_decode(
            query[:rows],
            key[:rows],
            value[:rows],
            kv,
            step.block_table,
            token_slots,
            positions[:rows],
            step.shares,
            launches.num_pieces,
            launches.tile_len,
            scale,
            out,
            RowQueries(launches.most_queries, launches.num_rows, launches.rows_at) if launches.num_queries else None,
            rotation,
        )
    if launches.num_earlier:
        attend_behind(
            query[rows:], key[rows:], value[rows:], kv, step.block_table, token_slots[rows:], step.chunks[0],
            launches.num_earlier, scale, out[rows:],
        )  # fmt: skip
    for first, length, count in launches.fresh:
        span = slice(first, first + length * count)
        attended = _attend_fresh(query[span], key[span], value[span], count, scale)
        if attended.shape == out.shape:
            return attended  # nothing else is in the step: nothing to copy
        out[span] = attended
    if launches.num_chunks:
        paged_prefill(
            query, kv, step.block_table, token_slots, step.chunks, launches.num_chunks, launches.longest_chunk, scale,
            out,
        )  # fmt: skip
    return out


def _shape_of_attend(query: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


# kv is written, which is not declared: declared, the compiler might copy the pool to be safe. Nothing else in a
# compiled layer touches it, so there is no order to keep.
_attend_over_pool = operator(attend_over_pool, _shape_of_attend)


def _attend_fresh(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """Causal attention of `count` prompts of one length, tensors [count * length, heads, head_dim], by torch.

    Within `library_attention`. Contiguous copies, where they are none: the library makes a plan for the strides too.
    """

    def by_prompt(tensor: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = tensor.contiguous().unflatten(0, (count, -1)).transpose(1, 2)
        return split

    out = F.scaled_dot_product_attention(
        by_prompt(query), by_prompt(key), by_prompt(value), is_causal=True, scale=scale, enable_gqa=True
    )
    by_token: torch.Tensor = out.transpose(1, 2).flatten(0, 1).contiguous()
    return by_token
