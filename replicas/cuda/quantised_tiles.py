"""Tiles of products of few rows with weights of few bits: as many bytes on their way as `skinny_linear.tile_of` has.

Chosen by `benchmarks.gpu.product_tiles` on an H200, at Llama-3.1-8B's four sizes and 1, 16 and 64 rows.
"""

from __future__ import annotations

from functools import cache

import torch

from replicas.kernels.parts_of_product import NARROWEST
from replicas.kernels.skinny_product import ProductTile

SMALLEST_BYTES = 99 * 1024  # of a program's memory: compute capability 8.6 and its like
_VERY_MANY_OUTPUTS, _MANY_OUTPUTS, _FEW_OUTPUTS = 16384, 4096, 2048
_MANY_INPUTS = 2048
_VERY_FEW_ROWS, _FEW_ROWS = 16, 32
_MANY_ROWS_BYTES = 128 * 1024  # what four stages take of 64 rows and 256 inputs of 8 bits


def scaled_tile(num_rows: int, num_out: int, num_in: int, most_bytes: int = SMALLEST_BYTES) -> ProductTile:
    """Of weights of 8 bits. most_bytes: of memory, that a program may have."""
    if num_out >= _VERY_MANY_OUTPUTS:
        if num_rows <= _VERY_FEW_ROWS:
            return ProductTile(NARROWEST, 256, 4, 4, 1)
        # Of 3 stages 4 programs fit a processor of Hopper's, of 4 only 3: then 28,672 outputs are done in two turns.
        return ProductTile(NARROWEST, 128, 4, 4 if num_rows <= _FEW_ROWS else 3, 1)
    num_stages = 4 if num_rows <= _FEW_ROWS or most_bytes >= _MANY_ROWS_BYTES else 3
    if num_out > _MANY_OUTPUTS or num_in < _MANY_INPUTS:
        return ProductTile(NARROWEST, 256, 4, num_stages, 1)
    is_cut = num_rows <= _FEW_ROWS or num_out <= _FEW_OUTPUTS
    return ProductTile(NARROWEST, 256, 4, num_stages, 4 if is_cut else 2)


def int4_tile(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """Of weights of 4 bits. Seven programs of up to 16 rows fit a processor of Hopper's, three of 64; each step of one
    waits for the memory, so that many at once are faster, but for what adding up their parts costs: more for more rows.
    """
    if num_out >= _VERY_MANY_OUTPUTS:
        num_parts = 4 if num_rows <= _VERY_FEW_ROWS else 2
    elif num_in < _MANY_INPUTS:
        num_parts = 1 if num_rows > _FEW_ROWS else 2
    else:
        num_parts = 8 if num_rows <= _FEW_ROWS else 4
    return ProductTile(2 * NARROWEST, 128, 4, 3, num_parts)


@cache
def program_bytes(device: torch.device) -> int:
    """Of memory, that a program may have there."""
    if device.type != "cuda":
        return SMALLEST_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST_BYTES))
