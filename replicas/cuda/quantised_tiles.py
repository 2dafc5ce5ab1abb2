"""Tiles of products of few rows with weights of few bits: as many bytes on their way as `skinny_linear.tile_of` has."""

from __future__ import annotations

from replicas.kernels.skinny_product import ProductTile

_BLOCK_N = 64
_VERY_MANY_OUTPUTS, _MANY_OUTPUTS, _MANY_INPUTS = 16384, 4096, 2048
_VERY_FEW_ROWS = 16
_FEW_ROWS = 32  # up to here inputs leave room for another stage in the 99 KB of compute capability 8.6


def scaled_tile(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """Of weights of 8 bits."""
    # Of 3 stages 4 programs fit a processor of Hopper's, of 4 only 3: then 28,672 outputs are done in two turns.
    num_stages = 4 if num_rows <= _FEW_ROWS else 3
    if num_out >= _VERY_MANY_OUTPUTS:
        return ProductTile(_BLOCK_N, 128, 4, num_stages, 1)
    if num_out > _MANY_OUTPUTS or num_in < _MANY_INPUTS:
        return ProductTile(_BLOCK_N, 256, 4, num_stages, 1)
    return ProductTile(_BLOCK_N, 256, 4, num_stages, 4 if num_out <= 2048 else 2)


def int4_tile(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """Of weights of 4 bits, whose steps are no longer than a group.

    With two warps the compiler takes the matrix units' older instructions, whose layout lets four bytes be read at
    once: 968 instructions for 8,192 weights of a step of few rows, against 1,300 to 1,450 with four (a multiprocessor
    has 960 slots in the time that these take to come from memory). It needs more programs at once. Of more rows
    four warps of 128 outputs have the fewest, 1,136.
    """
    is_cut = num_out < _VERY_MANY_OUTPUTS and num_in >= _MANY_INPUTS
    num_parts = (4 if num_out > _MANY_OUTPUTS else 8) if is_cut else 1
    if num_rows > _FEW_ROWS:
        return ProductTile(2 * _BLOCK_N, 128, 4, 3, num_parts)
    return ProductTile(_BLOCK_N, 128, 2, 6 if num_rows <= _VERY_FEW_ROWS else 4, num_parts)
