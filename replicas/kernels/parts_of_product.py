"""Parts of a product added up: by the last program of an output tile to arrive, in the parts' order, so that the sum is
the same each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.gate import gate_of_pairs

NARROWEST = 64  # outputs of a tile


def none_arrived(num_outputs: int, device: torch.device) -> torch.Tensor:
    """What products of so many outputs count in, by tiles of any width: each layer has its own. int32, zeros."""
    return torch.zeros(-(-num_outputs // NARROWEST), dtype=torch.int32, device=device)


def of_parts(num_parts: int, num_rows: int, num_out: int, device: torch.device) -> torch.Tensor:
    """Where parts of a product put theirs: float32 [num_parts, R, N], of nothing if there is one part."""
    return torch.empty(num_parts if num_parts > 1 else 0, num_rows, num_out, dtype=torch.float32, device=device)


@triton.jit
def store_product(
    total, bias, out, partial, arrived, tile, part, features, rows, num_rows, num_out, HAS_BIAS: tl.constexpr,
    NUM_PARTS: tl.constexpr, onto=None, IS_GATED: tl.constexpr = False, BLOCK_N: tl.constexpr = 0,
    ROWS: tl.constexpr = 0, IS_COMPILED: tl.constexpr = False,
) -> None:  # fmt: skip
    """total: float32 [features, rows], of one part of the inputs; bias is added to the sum of all of them. arrived is
    zeros before and afterwards. onto: numbers that the product, as it would be stored, is added to; laid out as out.
    IS_GATED: features are BLOCK_N of a tile, each gate with its up next to it; out: silu(gate) * up, of ROWS rows."""
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N) if IS_GATED else features
    is_feature = columns < num_out
    places = rows.to(tl.int64)[None, :] * num_out + columns[:, None]
    mask = is_feature[:, None] & (rows < num_rows)[None, :]
    is_last = True
    if NUM_PARTS > 1:
        part_size = num_rows.to(tl.int64) * num_out
        tl.store(partial + part * part_size + places, total, mask=mask)
        tl.debug_barrier()  # all of the program's numbers are there before it says so
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == NUM_PARTS - 1
        if is_last:
            tl.debug_barrier()
            total = tl.zeros_like(total)
            for number in range(NUM_PARTS):
                total += tl.load(partial + number * part_size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)  # as the next product wants to find it
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            numbers = gate_of_pairs(total, out.dtype.element_ty, BLOCK_N // 2, ROWS, IS_COMPILED)
            outputs = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            output_places = rows.to(tl.int64)[None, :] * (num_out // 2) + outputs[:, None]
            is_output = (outputs < num_out // 2)[:, None] & (rows < num_rows)[None, :]
            tl.store(out + output_places, numbers, mask=is_output)
        else:
            result = total.to(out.dtype.element_ty)
            if onto is not None:
                result = (result.to(tl.float32) + tl.load(onto + places, mask=mask).to(tl.float32)).to(result.dtype)
            tl.store(out + places, result, mask=mask)
