"""Any changed word changes its block's digest and no other; the arithmetic is what a kernel must do."""

from __future__ import annotations

import struct

import pytest
import torch

from replicas.kv.block_digests import DIGEST_BYTES, differing
from replicas.kv.kv_digest import BlockDigester

SHAPE = (12, 2, 2, 4, 2, 6)  # a block: 2 layers, K and V, 4 tokens, 2 heads of 6


def make_pool(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)


def _weight(position: int) -> int:
    mask = (1 << 64) - 1
    state = (position + 1) * 0x9E3779B97F4A7C15 & mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return (state ^ state >> 31) | 1


def naive_digest(pool: torch.Tensor, block_ids: list[int]) -> bytes:
    """The definition, in Python's own integers."""
    packed = b""
    for block_id in block_ids:
        words = struct.unpack("<" + "i" * (pool[0].numel() * pool.element_size() // 4), pool_bytes(pool, block_id))
        total = sum(word * _weight(position) for position, word in enumerate(words))
        packed += struct.pack("<Q", total & ((1 << 64) - 1))
    return packed


def pool_bytes(pool: torch.Tensor, block_id: int) -> bytes:
    return bytes(pool[block_id].contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matches_the_definition(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    digests = BlockDigester.for_pool(pool).digest_blocks(pool, [3, 0, 7])
    assert digests == naive_digest(pool, [3, 0, 7])
    assert len(digests) == 3 * DIGEST_BYTES


def test_each_block_has_its_own_digest_wherever_it_stands() -> None:
    pool = make_pool()
    digester = BlockDigester.for_pool(pool)
    alone = [digester.digest_blocks(pool, [block]) for block in range(12)]
    assert digester.digest_blocks(pool, [5, 0, 5, 11]) == alone[5] + alone[0] + alone[5] + alone[11]
    assert digester.digest_blocks(pool, []) == b""
    before = digester.digest_blocks(pool, range(12))
    pool[[3, 8], 0, 0, 0, 0, 0] += 1
    assert differing(digester.digest_blocks(pool, range(12)), before) == (3, 8)


def test_lists_of_digests_are_compared_block_by_block() -> None:
    one = bytes(range(24))
    assert differing(one, one) == ()
    assert differing(b"", b"") == ()
    assert differing(one[:8] + b"........" + one[16:], one) == (1,)
    assert differing(one[:23] + b".", b"." + one[1:]) == (0, 2)
    for other in (one[:16], one + one[:8], b""):
        with pytest.raises(ValueError, match="bytes of digests"):
            differing(one, other)
    with pytest.raises(ValueError, match="bytes of digests"):
        differing(one[:12], one[:12])


def test_groups_of_blocks_and_single_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    ids = list(range(12))
    grouped = BlockDigester.for_pool(pool)
    monkeypatch.setattr("replicas.kv.kv_digest._GROUP_WORDS", grouped.words_per_block * 5)  # 5 + 5 + 2
    ragged = BlockDigester.for_pool(pool)
    monkeypatch.setattr("replicas.kv.kv_digest._GROUP_WORDS", 1)
    single = BlockDigester.for_pool(pool)
    digests = {digester.digest_blocks(pool, ids) for digester in (grouped, ragged, single)}
    assert digests == {naive_digest(pool, ids)}


def test_two_pools_with_the_same_blocks_elsewhere_agree() -> None:
    pool, other = make_pool(), torch.zeros(SHAPE, dtype=torch.bfloat16)
    other[[9, 2, 4]] = pool[[1, 2, 3]]
    digester = BlockDigester.for_pool(pool)
    assert digester.digest_blocks(pool, [1, 2, 3]) == digester.digest_blocks(other, [9, 2, 4])


def test_every_single_bit_matters() -> None:
    pool = make_pool()
    digester = BlockDigester.for_pool(pool)
    before = digester.digest_blocks(pool, [5])
    raw = pool[5].view(torch.uint8).flatten()
    for position in range(raw.numel()):
        for bit in range(8):
            raw[position] ^= 1 << bit
            assert digester.digest_blocks(pool, [5]) != before
            raw[position] ^= 1 << bit
    assert digester.digest_blocks(pool, [5]) == before


def test_sign_flips_of_two_words_do_not_cancel() -> None:
    """They would with 64-bit words: the top bit of any product modulo 2^64 is the same."""
    pool = make_pool()
    digester = BlockDigester.for_pool(pool)
    before = digester.digest_blocks(pool, [5])
    flat = pool[5].flatten()
    for other in range(2, flat.numel()):
        flat[[1, other]] = -flat[[1, other]]
        assert digester.digest_blocks(pool, [5]) != before
        flat[[1, other]] = -flat[[1, other]]


def test_order_and_number_of_blocks_matter() -> None:
    pool = make_pool()
    digester = BlockDigester.for_pool(pool)
    variants = [[1, 2, 3], [2, 1, 3], [1, 2], [1, 2, 3, 3], [1, 2, 4], [3, 2, 1], []]
    assert len({digester.digest_blocks(pool, ids) for ids in variants}) == len(variants)
    pool.zero_()
    assert digester.digest_blocks(pool, [0]) != digester.digest_blocks(pool, [0, 1])


def test_swapped_words_within_a_block_matter() -> None:
    pool = make_pool(torch.float32)
    digester = BlockDigester.for_pool(pool)
    before = digester.digest_blocks(pool, [0])
    flat = pool[0].flatten()
    flat[[0, 1]] = flat[[1, 0]]
    assert digester.digest_blocks(pool, [0]) != before


def test_refuses_what_it_cannot_digest() -> None:
    pool = make_pool()
    digester = BlockDigester.for_pool(pool)
    for ids in ([12], [-1], [0, 99]):
        with pytest.raises(IndexError):
            digester.digest_blocks(pool, ids)
    with pytest.raises(ValueError):
        digester.digest_blocks(make_pool(torch.float32), [0])
    with pytest.raises(ValueError):
        BlockDigester.for_pool(torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError):
        BlockDigester(0)
