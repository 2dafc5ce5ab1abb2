"""Parts of a product added up: by the last program of an output tile to arrive, in the parts' order, so that the sum is
the same each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.gate import gate_of_product, halves_of_pairs

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
    NUM_PARTS: tl.constexpr, onto=None,
) -> None:  # fmt: skip
    """total: float32 [features, rows], of one part of the inputs; bias is added to the sum of all of them. arrived is
    zeros before and afterwards. onto: numbers that the product, as it would be stored, is added to; laid out as out."""
    is_feature = features < num_out
    places = rows.to(tl.int64)[None, :] * num_out + features[:, None]
    mask = is_feature[:, None] & (rows < num_rows)[None, :]
    is_last = True
    if NUM_PARTS > 1:
        part_size = num_rows.to(tl.int64) * num_out
        tl.store(partial + part * part_size + places, total, mask=mask)
        is_last = is_last_to_arrive(arrived + tile, NUM_PARTS)
        if is_last:
            tl.debug_barrier()
            total = tl.zeros_like(total)
            for number in range(NUM_PARTS):
                total += tl.load(partial + number * part_size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)  # as the next product wants to find it
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        result = total.to(out.dtype.element_ty)
        if onto is not None:
            result = (result.to(tl.float32) + tl.load(onto + places, mask=mask).to(tl.float32)).to(result.dtype)
        tl.store(out + places, result, mask=mask)


@triton.jit
def store_gate(
    total, bias, out, partial, arrived, tile, part, rows, num_rows, num_out, HAS_BIAS: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """As `store_product`, of `gated_features`: silu(gate) * up of the product once it is of out's type. Gates and ups
    go apart: as pairs they would take more registers than a product does, and fewer programs be at work at once."""
    gate, up = halves_of_pairs(total, BLOCK_N // 2, ROWS)
    outputs, num_gates = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), num_out // 2
    is_output = outputs < num_gates
    mask = is_output[:, None] & (rows < num_rows)[None, :]
    is_last = True
    if NUM_PARTS > 1:
        places = partial + rows.to(tl.int64)[None, :] * num_out + outputs[:, None]
        part_size = num_rows.to(tl.int64) * num_out
        tl.store(places + part * part_size, gate, mask=mask)
        tl.store(places + part * part_size + num_gates, up, mask=mask)
        is_last = is_last_to_arrive(arrived + tile, NUM_PARTS)
        if is_last:
            tl.debug_barrier()
            gate, up = tl.zeros_like(gate), tl.zeros_like(up)
            for number in range(NUM_PARTS):
                of_part = places + number * part_size
                gate += tl.load(of_part, mask=mask, other=0.0, cache_modifier=".cg")
                up += tl.load(of_part + num_gates, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        if HAS_BIAS:
            gate += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + num_gates + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
        numbers = gate_of_product(gate, up, out.dtype.element_ty, IS_COMPILED)
        tl.store(out + rows.to(tl.int64)[None, :] * num_gates + outputs[:, None], numbers, mask=mask)


@triton.jit
def gated_features(tile, num_out, BLOCK_N: tl.constexpr):
    """Of a tile, each gate with its up next to it; one is known where tile * BLOCK_N + its place is below num_out. By
    their places in the tile, which the compiler knows to be none below 0: its addresses lie in a row then."""
    places = tl.arange(0, BLOCK_N)
    return tile * (BLOCK_N // 2) + places // 2 + places % 2 * (num_out // 2)


@triton.jit
def is_last_to_arrive(place, num_parts):
    """Whether all other programs of so many have counted themselves at this place. Counts this one, all of whose
    numbers are stored then."""
    tl.debug_barrier()  # of the whole program, before it says so
    return tl.atomic_add(place, 1, sem="acq_rel") == num_parts - 1
