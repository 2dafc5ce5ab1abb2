"""What is sent: lengths and prompts. A function of its options and the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cluster.load.length_range import LengthRange
from cluster.load.traces import TraceEntry

TokenIds = npt.NDArray[np.int32]

# Seeds of prompts and of shared blocks never meet.
_PROMPTS, _BLOCKS = 1, 2

# Words that are one token each in the usual vocabularies, so that n of them are about n tokens.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"),
    *("his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were"),
    *("all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more"),
    *("if", "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of one request, and the blocks its prompt shares with others."""

    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 0

    @staticmethod
    def of(entry: TraceEntry) -> Shape:
        return Shape(entry.input_len, entry.output_len, entry.hash_ids, entry.block_tokens)


def synthetic_shapes(num_requests: int, inputs: LengthRange, outputs: LengthRange, seed: int) -> list[Shape]:
    """Independent lengths."""
    rng = random.Random(f"lengths {seed}")
    return [
        Shape(rng.randint(inputs.low, inputs.high), rng.randint(outputs.low, outputs.high)) for _ in range(num_requests)
    ]


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of exact length in token ids, or of about that length in words.

    first_id..last_id: ids drawn, both included. Prompts without hash ids share nothing; block i of a prompt with them
    depends on its i-th hash id alone, so that equal hash ids are equal tokens.
    """

    seed: int
    first_id: int
    last_id: int

    def token_ids(self, index: int, shape: Shape) -> TokenIds:
        """The prompt of request `index`."""
        ids = (self.first_id, self.last_id)
        parts = [_block_ids((self.seed, _BLOCKS, hash_id), shape.block_tokens, *ids) for hash_id in shape.hash_ids]
        rest = shape.input_len - sum(map(len, parts))
        if rest > 0:
            parts.append(_random_ids((self.seed, _PROMPTS, index), rest, *ids))
        return np.concatenate(parts)[: shape.input_len]

    def text(self, index: int, shape: Shape) -> str:
        """Words, each chosen by one of the prompt's token ids: what is shared as ids is shared as text."""
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.token_ids(index, shape))


def _random_ids(key: tuple[int, int, int], length: int, first_id: int, last_id: int) -> TokenIds:
    return np.random.default_rng(key).integers(first_id, last_id, size=length, dtype=np.int32, endpoint=True)


_block_ids = lru_cache(maxsize=4096)(_random_ids)
