"""Random paged batches, and attention over them in float64 straight from the definition: the kernels' oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class PagedCase:
    """kv: one layer's view of a pool of two layers. Everything that no context holds is NaN."""

    kv: torch.Tensor
    table: torch.Tensor
    keys: list[torch.Tensor]  # per sequence, [length, num_kv_heads, head_dim]
    values: list[torch.Tensor]


def paged_case(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    written: list[int] | None = None,
) -> PagedCase:
    """Sequences of these lengths in shuffled blocks. written: how many of each one's tokens are in the pool already."""
    generator = torch.Generator().manual_seed(hash((tuple(lengths), num_kv_heads, head_dim)) % 2**31)
    num_blocks = [-(-max(length, 1) // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(num_blocks), generator=generator)
    pool = torch.full((sum(num_blocks), 2, 2, BLOCK_SIZE, num_kv_heads, head_dim), torch.nan)
    table = torch.full((len(lengths) + 1, max(num_blocks) + 3), 10**9)  # stale entries lie outside the pool
    keys, values, first = [], [], 0
    for row, length in enumerate(lengths):
        blocks = order[first : first + num_blocks[row]]
        first += num_blocks[row]
        table[row, : len(blocks)] = blocks
        pair = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        keys.append(pair[0])
        values.append(pair[1])
        count = length if written is None else written[row]
        places = torch.arange(count)
        for kind in (0, 1):
            pool[blocks[places // BLOCK_SIZE], 1, kind, places % BLOCK_SIZE] = pair[kind, :count].float()
    kv = pool.to(device, dtype)[:, 1]
    return PagedCase(kv, table.to(device), keys, values)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float
) -> torch.Tensor:
    """query [n, num_heads, head_dim] at positions position..: float64, causal, key by key as written in the paper."""
    group = query.shape[1] // keys.shape[1]
    k = keys.double().repeat_interleave(group, 1)
    v = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    hidden = torch.arange(keys.shape[0])[None, :] > position + torch.arange(query.shape[0])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_behind.library_attention_of`, in float64."""
    group = query.shape[1] // key.shape[1]
    k, v = (tensor.double().repeat_interleave(group, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype).contiguous()
    return out, scores.logsumexp(-1).float()


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double().cpu() - reference).norm() / reference.norm())
