"""The names of a sequence's full blocks: those of its prompt at once, those of its output as they fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from scheduler.prefix_hash import ID_BYTES, KEY_BYTES, id_bytes, keys_of_bytes


@dataclass(frozen=True, slots=True)
class PromptChain:
    """keys[i] names block i of the prompt, start is what the first one builds on. ids: of the prompt's tokens, packed
    (`prefix_hash.id_bytes`); block_bytes: of those of one block."""

    start: bytes
    keys: list[bytes]
    ids: bytes
    block_bytes: int

    def parent(self, index: int) -> bytes:
        """What block `index` builds on."""
        return self.keys[index - 1] if index else self.start


def prompt_chain(start: bytes, prompt_ids: Sequence[int], block_size: int) -> PromptChain:
    """Raises OverflowError as `block_keys`."""
    ids, block_bytes = id_bytes(prompt_ids), block_size * ID_BYTES
    return PromptChain(start, keys_of_bytes(start, ids, block_bytes), ids, block_bytes)


class OutputChain:
    """Of one choice: the block that its tokens fill. index: of that block in its table. ids: tokens from its first
    position on, as far as they are known; the last one's KV is not written yet."""

    __slots__ = ("ids", "index", "parent")

    def __init__(self, parent: bytes, index: int, ids: list[int]) -> None:
        self.parent, self.index, self.ids = parent, index, ids

    def next_block(self, block_size: int) -> tuple[bytes, bytes]:
        """The key and the packed ids of the block, which is full. Mutates: the one behind it is next."""
        ids = id_bytes(self.ids[:block_size])
        self.parent = key = blake2b(self.parent + ids, digest_size=KEY_BYTES).digest()
        self.index += 1
        del self.ids[:block_size]
        return key, ids
