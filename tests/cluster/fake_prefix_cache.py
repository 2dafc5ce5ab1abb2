"""The prefix cache of a scripted replica: blocks by the names that engines give them, the last used ones."""

from __future__ import annotations

from replicas.messages import GenerationSpec
from scheduler.prefix_hash import block_keys, chain_start
from scheduler.recent_keys import PIECE_BLOCKS, RecentKeys


class FakePrefixCache:
    """num_found: tokens, of each prompt in order."""

    def __init__(self, fingerprint: str, num_blocks: int, block_size: int, epoch: str) -> None:
        self._fingerprint, self._num_blocks, self._block_size = fingerprint, num_blocks, block_size
        self._blocks: dict[bytes, None] = {}
        self.log = RecentKeys(epoch)
        self.num_found: list[int] = []

    def keys(self, spec: GenerationSpec) -> list[bytes]:
        return block_keys(chain_start(self._fingerprint, spec.cache_salt), spec.prompt_ids, self._block_size)

    def take(self, spec: GenerationSpec) -> int:
        """Of this prompt it had so many tokens; now it has all whole blocks. Mutates."""
        keys = self.keys(spec)
        found = 0
        while found < len(keys) and keys[found] in self._blocks:
            found += 1
        for key in reversed(keys):
            self._blocks.pop(key, None)
            self._blocks[key] = None
        for key in keys[PIECE_BLOCKS - 1 :: PIECE_BLOCKS]:
            self.log.append(key)
        while len(self._blocks) > self._num_blocks:
            self._blocks.pop(next(iter(self._blocks)))
        if not spec.use_cache:
            found = 0
        self.num_found.append(min(found, (spec.prompt_len - 1) // self._block_size) * self._block_size)
        return self.num_found[-1]

    def evict_all(self) -> None:
        """Nobody is told."""
        self._blocks.clear()
