"""Tiles of products of few rows with weights of few bits: as many bytes on their way as `skinny_linear.tile_of` has."""

from __future__ import annotations

from replicas.kernels.skinny_product import ProductTile

_BLOCK_N = 64
_VERY_MANY_OUTPUTS, _MANY_OUTPUTS, _MANY_INPUTS = 16384, 4096, 2048
_FEW_ROWS = 32  # up to here inputs leave room for another stage in the 99 KB of compute capability 8.6


def scaled_tile(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """Of weights of 8 bits."""
    if num_out >= _VERY_MANY_OUTPUTS:
        return ProductTile(_BLOCK_N, 128, 4, 4, 1)
    num_stages = 4 if num_rows <= _FEW_ROWS else 3
    if num_out > _MANY_OUTPUTS or num_in < _MANY_INPUTS:
        return ProductTile(_BLOCK_N, 256, 4, num_stages, 1)
    return ProductTile(_BLOCK_N, 256, 4, num_stages, 4 if num_out <= 2048 else 2)


def int4_tile(num_rows: int, num_out: int, num_in: int) -> ProductTile:
    """Of weights of 4 bits, whose steps are no longer than a group."""
    num_stages = 6 if num_rows <= _FEW_ROWS else 4
    if num_out >= _VERY_MANY_OUTPUTS or num_in < _MANY_INPUTS:
        return ProductTile(_BLOCK_N, 128, 4, num_stages, 1)
    return ProductTile(_BLOCK_N, 128, 4, num_stages, 2 if num_out > _MANY_OUTPUTS else 4)
