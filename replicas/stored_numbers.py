"""Keys and values in 8 bits: how they are rounded to be stored, and how they are read back.

The format is e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022), in torch's variant without infinities:
3 bits of mantissa, numbers up to 448, the least of them 2**-9.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


def as_stored(numbers: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rounded to a pool's type. With FP8: number / scale, to the nearest, ties to even; what is too large becomes the
    largest, and only what is no number stays none. Pure.
    """
    if dtype is not FP8:
        return numbers.to(dtype)
    if scale != 1.0:
        numbers = numbers.float() * (1.0 / scale)  # as the kernels do it, which have no exact division
    return numbers.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def as_bits(stored: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, if it is FP8: torch moves and fills these, but on a CPU not all of it in that type."""
    return stored.view(torch.uint8) if stored.dtype is FP8 else stored


class Fp8Reader:
    """Makes FP8 numbers those of another type, all of them exactly: by a table of pairs, which takes a tenth of the
    time of torch's conversion on a CPU. Owns the table, half a megabyte for float32. Any thread.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of the model, in 2 or 4 bytes."""
        self._as_pairs = torch.int64 if dtype.itemsize == 4 else torch.int32
        pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        self._table = pairs.view(FP8).to(dtype).view(self._as_pairs)

    def read(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """stored: contiguous, an even number of FP8 or their bytes; out: as many, contiguous. Mutates out."""
        pairs = stored.view(-1).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
        torch.index_select(self._table, 0, pairs, out=out.view(-1).view(self._as_pairs))


def is_scale(number: float) -> bool:
    """Whether numbers can be stored by it: its inverse too is a number of 32 bits."""
    return 2.0**-126 <= number <= 2.0**126
