"""Philox4x32-10: noise as a pure function of (key, counter). No generator state.

Algorithm: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11; checked against the
known-answer vectors of its authors' library, Random123. 32-bit words are held in int64 tensors, so CPU and CUDA draw
the same integers.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
WORD = 0xFFFFFFFF

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


class Purpose(IntEnum):
    """The last counter word: draws for different purposes never share noise."""

    TOKEN = 0


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Four words of noise for each counter and key.

    counter, key: int64 tensors of values in [0, 2**32), broadcastable with each other. Result: the same, in the
    broadcast shape. Mutates nothing.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit pattern of a product is right even where int64 overflows: torch wraps around. Its high half is
        # sign-extended by the shift, and c1 and c3 keep a whole product; a word is cut to 32 bits only where it is
        # multiplied next, since the xor in between does not mix bits.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ (c1 ^ k0)) & WORD
        c2 = ((product_0 >> 32) ^ (c3 ^ k1)) & WORD
        c1 = product_1
        c3 = product_0
        k0 = (k0 + WEYL_0) & WORD
        k1 = (k1 + WEYL_1) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def token_noise(
    seed: Tensor, choice: Tensor, position: Tensor, vocab_size: int, purpose: Purpose = Purpose.TOKEN
) -> Tensor:
    """One noise word for each row and token id: int64 [R, vocab_size], values in [0, 2**32).

    seed, choice, position: int64 [R] (choice and position below 2**32; all 64 bits of seed count). The word of token t
    is lane t & 3 of philox(counter = (t >> 2, position, choice, purpose), key = (low, high half of seed)).
    """
    group = torch.arange((vocab_size + 3) // 4, device=seed.device).unsqueeze(0)
    last = torch.full_like(position, int(purpose)).unsqueeze(1)
    counter = (group, position.unsqueeze(1), choice.unsqueeze(1), last)
    key = ((seed & WORD).unsqueeze(1), ((seed >> 32) & WORD).unsqueeze(1))
    lanes = torch.stack(philox4x32(counter, key), dim=-1)
    return lanes.flatten(1)[:, :vocab_size]


def noise_of_tokens(
    seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor, purpose: Purpose = Purpose.TOKEN
) -> Tensor:
    """The words that token_noise has for some tokens: int64 [N], of int64 [N] each. A token costs as four do there."""
    counter = (token_id >> 2, position, choice, torch.full_like(token_id, int(purpose)))
    lanes = torch.stack(philox4x32(counter, (seed & WORD, (seed >> 32) & WORD)), dim=-1)
    return lanes.gather(1, (token_id & 3).unsqueeze(1)).squeeze(1)
