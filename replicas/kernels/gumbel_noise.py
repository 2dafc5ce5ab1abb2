"""Gumbel noise from the words of a counter-based generator, for `token_draw` and `token_pick`."""

from __future__ import annotations

import os

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    from triton.language.extra import libdevice
else:
    libdevice = None  # Triton's interpreter has none; NumPy's logarithm is exact enough there

IS_EXACT = libdevice is not None


@triton.jit
def gumbel(word, EXACT: tl.constexpr):
    """Of 32 uniform bits. EXACT: IS_EXACT."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    if EXACT:
        exponential = -libdevice.log1p(-uniform)
        noise = -libdevice.log(exponential)
    else:
        # Kahan's log1p: as exact as the logarithm it is made of.
        rest = 1.0 - uniform
        exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest))
        noise = -tl.log(exponential)
    return noise
