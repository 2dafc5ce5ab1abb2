"""Philox against the Random123 known-answer vectors and against an independent implementation in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from replicas.sampling.philox import Purpose, noise_of_tokens, philox4x32, token_noise

# Random123, tests/kat_vectors: philox4x32 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Written from the paper's formulas, with Python's unbounded integers and explicit high and low halves."""
    left_0, right_0, left_1, right_1 = counter
    key_0, key_1 = key
    for number in range(10):
        if number:
            key_0 = (key_0 + 0x9E3779B9) % 2**32
            key_1 = (key_1 + 0xBB67AE85) % 2**32
        high_0, low_0 = divmod(left_0 * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(left_1 * 0xCD9E8D57, 2**32)
        left_0, right_0, left_1, right_1 = high_1 ^ right_0 ^ key_0, low_1, high_0 ^ right_1 ^ key_1, low_0
    return left_0, right_0, left_1, right_1


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    k0, k1 = (torch.tensor([word]) for word in words(key))
    drawn = tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1)))
    assert drawn == words(result)
    assert plain_philox(words(counter), words(key)) == words(result)


def test_random_counters_equal_the_plain_implementation() -> None:
    rng = random.Random(7)
    counters = [tuple(rng.getrandbits(32) for _ in range(4)) for _ in range(500)]
    keys = [tuple(rng.getrandbits(32) for _ in range(2)) for _ in range(500)]
    c0, c1, c2, c3 = torch.tensor(counters).unbind(1)
    k0, k1 = torch.tensor(keys).unbind(1)
    drawn = torch.stack(philox4x32((c0, c1, c2, c3), (k0, k1)), dim=1).tolist()
    assert drawn == [list(plain_philox(counter, key)) for counter, key in zip(counters, keys, strict=True)]


def test_token_noise_lays_out_counters_and_lanes_as_documented() -> None:
    vocab_size = 11  # not a multiple of 4
    seeds = [0, 5, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    choices = [0, 1, 2, 3, 127, 2**32 - 1]
    positions = [0, 1, 17, 2047, 2**31, 2**32 - 1]
    noise = token_noise(torch.tensor(seeds), torch.tensor(choices), torch.tensor(positions), vocab_size)
    assert noise.shape == (6, vocab_size)
    assert noise.dtype == torch.int64
    for row, (seed, choice, position) in enumerate(zip(seeds, choices, positions, strict=True)):
        key = (seed % 2**32, (seed >> 32) % 2**32)
        for token in range(vocab_size):
            counter = (token >> 2, position, choice, int(Purpose.TOKEN))
            assert int(noise[row, token]) == plain_philox(counter, key)[token & 3]


def test_words_are_32_bits_and_balanced() -> None:
    seeds = torch.arange(8)
    noise = token_noise(seeds, torch.zeros_like(seeds), seeds, 8192)
    assert int(noise.min()) >= 0
    assert int(noise.max()) < 2**32
    for bit in range(32):
        ones = int(((noise >> bit) & 1).sum())
        assert abs(ones - noise.numel() / 2) < 5 * (noise.numel() / 4) ** 0.5, f"bit {bit}"


def test_noise_of_some_tokens_is_that_of_all() -> None:
    seed = torch.tensor([0, -1, 2**63 - 1, 0x0123456789ABCDEF])
    choice, position = torch.tensor([0, 3, 127, 2**32 - 1]), torch.tensor([0, 9, 2**32 - 1, 5])
    every = token_noise(seed, choice, position, 1001)
    row, token = (every % 3 == 0).nonzero(as_tuple=True)
    assert len(token) > 1000
    assert torch.equal(noise_of_tokens(seed[row], choice[row], position[row], token), every[row, token])
