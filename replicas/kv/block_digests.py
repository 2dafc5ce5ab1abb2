"""Digests of KV blocks as they travel and are kept: 8 bytes each, one behind the other, in the order of the blocks.

What such a digest is says `kv_digest`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DIGEST_BYTES = 8  # of one block

# Of these blocks of one pool, in this order: DIGEST_BYTES each. Blocks its thread until they are there.
DigestBlocks = Callable[[Sequence[int]], bytes]


def differing(found: bytes, expected: bytes) -> tuple[int, ...]:
    """The places, counted in blocks, at which two lists of digests differ. Raises ValueError for unequal lengths."""
    if len(found) != len(expected) or len(found) % DIGEST_BYTES:
        raise ValueError(f"{len(found)} bytes of digests for {len(expected)}")
    if found == expected:
        return ()
    starts = range(0, len(found), DIGEST_BYTES)
    pairs = ((found[start : start + DIGEST_BYTES], expected[start : start + DIGEST_BYTES]) for start in starts)
    return tuple(place for place, (one, other) in enumerate(pairs) if one != other)
