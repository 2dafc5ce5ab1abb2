"""Names of KV blocks by their content: a hash chain over the ids of all tokens up to a block's end.

A key names what the KV of a block depends on: who computed it (the start of its chain), every token before it and its
own. Only full blocks have one. blake2b of 16 bytes (RFC 7693), as it is the fastest of hashlib's on short input.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
ID_BYTES = 4


def chain_start(fingerprint: str, salt: bytes = b"") -> bytes:
    """What a chain starts from: KEY_BYTES bytes. No two pairs of fingerprint and salt give the same input to the hash.

    fingerprint: of what computes the KV. salt: of who may share it.
    """
    name = fingerprint.encode()
    return blake2b(
        len(name).to_bytes(4, "little") + name + len(salt).to_bytes(4, "little") + salt, digest_size=KEY_BYTES
    ).digest()


def block_keys(start: bytes, ids: Sequence[int], block_size: int) -> list[bytes]:
    """KEY_BYTES bytes for each full block of ids, in order.

    start: of the chain, or the key of the block before the first one. Raises OverflowError for an id that is no
    unsigned 32-bit number.
    """
    return keys_of_bytes(start, id_bytes(ids), block_size * ID_BYTES)


def keys_of_bytes(start: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
    """As `block_keys`. ids: packed; block_bytes: of those of one block."""
    keys = []
    key = start
    for end in range(block_bytes, len(ids) + 1, block_bytes):
        key = blake2b(key + ids[end - block_bytes : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def id_bytes(ids: Sequence[int]) -> bytes:
    """Each id as ID_BYTES bytes, little-endian. Raises OverflowError for an id that is no unsigned 32-bit number."""
    packed = array("I", ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()
