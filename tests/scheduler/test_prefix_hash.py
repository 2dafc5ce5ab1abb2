"""Names of KV blocks: the values are fixed, as engines and routers of different processes must agree."""

import random
from hashlib import blake2b

import pytest

from scheduler.prefix_hash import KEY_BYTES, block_keys, chain_start, id_bytes

SALT = bytes(range(16))


@pytest.mark.parametrize(
    ("fingerprint", "salt", "start"),
    [
        ("f", b"x" * 16, "5fed5a670c2e7b30098153ab4bf7a4eb"),
        ("f", b"", "83a2fd8925c3ae9a9d2a1358b5b9d725"),
        ("", b"", "c804ce198ec337e3dc762bdd1a09aece"),
    ],
)
def test_a_chain_starts_from_fingerprint_and_salt(fingerprint: str, salt: bytes, start: str) -> None:
    assert chain_start(fingerprint, salt).hex() == start


@pytest.mark.parametrize(
    ("ids", "block_size", "keys"),
    [
        ([], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, ["1f0ce9d258e1c1eb4c121e6c25e2b20f", "25f9829ab678851b16648cb2554dda5b"]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, ["1f0ce9d258e1c1eb4c121e6c25e2b20f", "25f9829ab678851b16648cb2554dda5b"]),
    ],
)
def test_each_full_block_has_a_key(ids: list[int], block_size: int, keys: list[str]) -> None:
    assert [key.hex() for key in block_keys(chain_start("f"), ids, block_size)] == keys


@pytest.mark.parametrize("seed", range(5))
def test_a_key_is_the_hash_of_its_parent_and_its_ids(seed: int) -> None:
    rng = random.Random(seed)
    block_size, start = rng.choice((1, 3, 16)), chain_start("model", SALT)
    ids = tuple(rng.randrange(1 << 32) for _ in range(rng.randrange(200)))
    keys, parent = block_keys(start, ids, block_size), start
    assert len(keys) == len(ids) // block_size
    for index, key in enumerate(keys):
        mine = ids[index * block_size : (index + 1) * block_size]
        parent = blake2b(parent + b"".join(i.to_bytes(4, "little") for i in mine), digest_size=KEY_BYTES).digest()
        assert key == parent


def test_a_chain_goes_on_where_it_was_left() -> None:
    ids = list(range(100))
    whole = block_keys(chain_start("f"), ids, 16)
    assert block_keys(whole[1], ids[32:], 16) == whole[2:]


def test_whatever_comes_earlier_is_in_the_key() -> None:
    ids = list(range(64))
    keys = block_keys(chain_start("f"), ids, 16)
    for position in (0, 20, 63):
        others = block_keys(chain_start("f"), [*ids[:position], 999, *ids[position + 1 :]], 16)
        first = position // 16
        assert others[:first] == keys[:first]
        assert not set(others[first:]) & set(keys)


def test_fingerprint_and_salt_cannot_be_moved_into_each_other() -> None:
    starts = [chain_start("ab", b"c"), chain_start("a", b"bc"), chain_start("abc"), chain_start("", b"abc")]
    starts += [chain_start("f", b""), chain_start("f", b"\0"), chain_start("f\0"), chain_start("f", b"\0\0")]
    assert len(set(starts)) == len(starts)


def test_ids_of_four_bytes_only() -> None:
    assert id_bytes([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert len(block_keys(chain_start("f"), [(1 << 32) - 1], 1)) == 1
    for token_id in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            block_keys(chain_start("f"), [token_id], 1)
