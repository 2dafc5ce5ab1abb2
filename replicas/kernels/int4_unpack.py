"""A matrix of 4 bits made numbers, for products of many rows: `packed_weights.dequantised`, bit for bit.

Torch's own operators take half a dozen passes over it, each of up to 8 bytes a weight; this reads and writes once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from replicas.kernels.int4_numbers import int4_numbers
from replicas.kernels.pool_numbers import is_compiled

_ROWS, _WORDS = 4, 512  # of a program


@triton.jit
def _unpack(
    weight, factors, out, num_out, num_words, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
) -> None:  # fmt: skip
    """Some words of some outputs: four weights each, 8 inputs apart."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = (rows < num_out)[:, None] & (places < num_words)[None, :]
    words = tl.load(weight + rows.to(tl.int64)[:, None] * num_words + places[None, :], mask=is_word, other=0)
    inputs = places // 8 * 32 + places % 8
    # 32 inputs next to each other are of one group.
    of_groups = factors + (inputs // GROUP_SIZE)[None, :] * num_out + rows[:, None]
    made_by = tl.load(of_groups, mask=is_word, other=0)
    first, second, third, last = int4_numbers(words, made_by, out.dtype.element_ty, IS_COMPILED)
    begin = out + rows.to(tl.int64)[:, None] * (4 * num_words) + inputs[None, :]
    tl.store(begin, first, mask=is_word)
    tl.store(begin + 8, second, mask=is_word)
    tl.store(begin + 16, third, mask=is_word)
    tl.store(begin + 24, last, mask=is_word)


def int4_unpack(weight: torch.Tensor, factors: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of this type, which is of 16 bits. weight uint8 [N, K / 2] and group_size as in `PackedWeights`, factors
    as in `group_factors`; contiguous, group_size a multiple of 32. Does not block."""
    num_out, num_words = weight.shape[0], weight.shape[1] // 2
    out = torch.empty(num_out, 4 * num_words, dtype=dtype, device=weight.device)
    words = min(_WORDS, triton.next_power_of_2(num_words))
    _unpack[(triton.cdiv(num_out, _ROWS), triton.cdiv(num_words, words))](
        weight.view(torch.int16), factors, out, num_out, num_words, GROUP_SIZE=group_size, ROWS=_ROWS, WORDS=words,
        IS_COMPILED=is_compiled(weight.device), num_warps=8,
    )  # fmt: skip
    return out
