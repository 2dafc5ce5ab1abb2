"""Keys and values that a sequence has in the pool already, copied out of their blocks into one row, as a library wants.

Read and written once, where attention then reads once for every tile of queries: 15 us for 6,144 tokens of
Llama-3.1-8B, beside some 400 of attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.pool_numbers import as_numbers, is_compiled

_AT_ONCE = 4096  # numbers of a program


@triton.jit
def _copy_part(
    kv, table, slot, chunk, keys, values, num_numbers, kv_stride_block, kv_stride_value, table_stride,
    BLOCK_NUMBERS: tl.constexpr, AT_ONCE: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """A part of the keys or values of one block. Zeros where the chunk is padding: nobody knows its blocks."""
    number = tl.program_id(0).to(tl.int64)
    is_value = tl.program_id(2)
    has_tokens = tl.load(chunk + 1) > 0
    block = tl.load(table + tl.load(slot).to(tl.int64) * table_stride + number, mask=has_tokens, other=0).to(tl.int64)
    within = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    to = number * BLOCK_NUMBERS + within
    mask = (within < BLOCK_NUMBERS) & (to < num_numbers)
    stored = tl.load(
        kv + block * kv_stride_block + is_value * kv_stride_value + within, mask=mask & has_tokens, other=0.0
    )
    numbers = as_numbers(stored, keys.dtype.element_ty, IS_COMPILED)
    if is_value:
        tl.store(values + to, numbers, mask=mask)
    else:
        tl.store(keys + to, numbers, mask=mask)


def earlier_keys(
    kv: torch.Tensor,
    table: torch.Tensor,
    slot: torch.Tensor,
    chunk: torch.Tensor,
    num_tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first num_tokens keys and values of a slot's sequence: [num_tokens, num_kv_heads, head_dim] each, of dtype.

    kv, table as in `paged_decode`; slot: int32 [>= 1], the first one counts; chunk: int32 [>= 2], its second number is
    the length of the chunk behind them: where it is 0, they are zeros. Does not block.
    """
    block_size, num_kv_heads, head_dim = kv.shape[2:]
    of_block = block_size * num_kv_heads * head_dim
    keys, values = torch.empty(2, num_tokens, num_kv_heads, head_dim, dtype=dtype, device=kv.device).unbind()
    _copy_part[(triton.cdiv(num_tokens, block_size), triton.cdiv(of_block, _AT_ONCE), 2)](
        kv, table, slot, chunk, keys, values, keys.numel(), kv.stride(0), kv.stride(1), table.stride(0),
        BLOCK_NUMBERS=of_block, AT_ONCE=_AT_ONCE, IS_COMPILED=is_compiled(kv.device), num_warps=4,
    )  # fmt: skip
    return keys, values
