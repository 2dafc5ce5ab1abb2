"""Weights of 4 bits in the order in which a card's kernels read them, and what they are made numbers by.

Four of them are a word of 16 bits, so that two words in a register of 32 become four pairs of numbers by shifts and
masks alone, already where the matrix units want them (`int4_numbers`). 32 words are 128 inputs next to each other, a
chunk: word e has inputs e, 32 + e, 64 + e and 96 + e of it, the first in its lowest bits, so that a quarter of a chunk
is 64 bytes of an input's row. Behind a chunk of one output comes the same one of the next: what a program reads at once
is a few kilobytes in a row. By outputs it would be 64 bytes of each, at which memory gives half of what it can.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 128
QUARTER = CHUNK // 4
_ZERO_BITS = 0xFF


def words_of(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0 to 15 -> int16 [chunks, N, QUARTER]; the last chunk is filled with 0."""
    numbers = F.pad(numbers, (0, -numbers.shape[1] % CHUNK))
    quarters = numbers.unflatten(1, (-1, 2, 2, QUARTER))  # the word's byte, and its half
    as_bytes = (quarters[:, :, :, 0] | (quarters[:, :, :, 1] << 4)).transpose(2, 3).contiguous()
    return as_bytes.view(torch.int16).squeeze(3).transpose(0, 1).contiguous()


def numbers_of(words: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """The reverse of `words_of`."""
    as_bytes = words.transpose(0, 1).contiguous().unsqueeze(3).view(torch.uint8).transpose(2, 3)
    numbers = torch.stack((as_bytes & 15, as_bytes >> 4), dim=3).flatten(1)
    return numbers[:, :num_inputs]


def group_factors(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What weights of a group are made numbers by, a word each, those of one group for all outputs next to each other:
    scales of 16 or 32 bits and zeros uint8 [N, groups] -> int32 [groups, N].

    The zero point is in the low 8 bits, the scale in float32 without its own there. The last bit that it keeps says
    whether one was set behind it: then it is rounded to a type of 16 bits as the whole one would be (rounding to odd;
    Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    words = scales.float().contiguous().view(torch.int32)
    kept = words & ~_ZERO_BITS
    kept |= ((words & _ZERO_BITS) != 0).int() * (_ZERO_BITS + 1)
    return (kept | zeros.int()).t().contiguous()
