"""A softmax over tiles of keys, one behind the other: each tile's weights, and what they make of all tiles before.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; to the base of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_of_tile(scores, largest, SEES_ALL: tl.constexpr):
    """Weights of a tile, by what all sums of earlier ones are to be multiplied, and the largest score by now.

    scores: [rows, keys], -inf where a row does not see a key; largest: [rows], of earlier tiles, -inf before the first.
    SEES_ALL: every row has seen a key by now. Else all weights of one that has not are 0.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    peak = new_largest if SEES_ALL else tl.where(new_largest > float("-inf"), new_largest, 0.0)
    weights = tl.exp2(scores - peak[:, None])
    shrink = tl.exp2(largest - peak)
    return weights, shrink, new_largest
