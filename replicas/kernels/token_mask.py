"""Forbids tokens on the GPU, in the logits themselves: where a row's mask has no bit for a token, its logit is -inf.

Rows without a mask are not touched, and whatever draws afterwards is what draws without masks: a forbidden token is one
with no probability. It writes only, a row of 128k tokens in bfloat16 a quarter of a megabyte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _forbid(logits, words, places, logits_stride, words_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        is_id = ids < VOCAB
        word = tl.load(words + place * words_stride + ids // 32, mask=is_id, other=-1)
        is_forbidden = ((word >> (ids % 32)) & 1) == 0
        forbidden = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * logits_stride + ids, forbidden, mask=is_id & is_forbidden)


def forbid_tokens(logits: torch.Tensor, words: torch.Tensor, mask_places: torch.Tensor) -> None:
    """logits [R, V], rows contiguous, of any float type; words int32 [n, at least V / 32], the lowest bit of a word
    first, 1: allowed; mask_places int32 [R], where in words each row's mask is, -1: it has none. Mutates the logits.
    Does not block."""
    num_rows, vocab_size = logits.shape
    _forbid[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits, words, mask_places, logits.stride(0), words.stride(0), VOCAB=vocab_size, BLOCK=_BLOCK
    )
