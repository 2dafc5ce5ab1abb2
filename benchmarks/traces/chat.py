"""`python -m benchmarks.traces.chat` writes chat.jsonl: an invented hour of chats, in Mooncake's form.

Nobody's requests: conversations begin at random, more of them in two bursts, and go on for some turns. Each turn's
prompt is all that was said before and a new question, so the blocks of one conversation begin with those of the turn
before; all of them begin with one of three system prompts. The same seed gives the same file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("chat.jsonl")
BLOCK_TOKENS = 512  # of Mooncake's form
_SEED = 20261129
_NUM_CONVERSATIONS = 64
_HOUR_S = 3_600.0
_BURSTS_S = ((900.0, 960.0), (2_400.0, 2_430.0))
_BURST_SHARE = 0.3
_SYSTEM_BLOCKS = (1, 1, 2)
_MAX_TURNS = 5


@dataclass(frozen=True, slots=True)
class Turn:
    at_s: float
    input_len: int
    output_len: int
    hash_ids: list[int]

    def row(self) -> dict[str, Any]:
        return {
            "timestamp": round(self.at_s * 1000),
            "input_length": self.input_len,
            "output_length": self.output_len,
            "hash_ids": self.hash_ids,
        }


def chat_trace() -> str:
    """The file's text: one request a line, in the order of time."""
    random_ = random.Random(_SEED)
    system_ids = _system_prompts()
    next_id = sum(_SYSTEM_BLOCKS)
    turns: list[Turn] = []
    for _ in range(_NUM_CONVERSATIONS):
        ids = list(random_.choice(system_ids))
        conversation = list(_conversation(random_, ids, next_id))
        next_id = 1 + max(next_id, *(max(turn.hash_ids) for turn in conversation))
        turns += conversation
    turns.sort(key=lambda turn: turn.at_s)
    return "".join(json.dumps(turn.row(), separators=(",", ":")) + "\n" for turn in turns)


def _system_prompts() -> list[list[int]]:
    first = 0
    prompts = []
    for num_blocks in _SYSTEM_BLOCKS:
        prompts.append(list(range(first, first + num_blocks)))
        first += num_blocks
    return prompts


def _conversation(random_: random.Random, ids: list[int], next_id: int) -> Iterator[Turn]:
    """Its turns. ids: blocks of its system prompt; blocks of its own are numbered from next_id."""
    at_s = _beginning(random_)
    num_tokens = len(ids) * BLOCK_TOKENS
    for _ in range(random_.randint(1, _MAX_TURNS)):
        num_tokens += _length(random_, 180, 2_000)
        while len(ids) * BLOCK_TOKENS < num_tokens:
            ids.append(next_id)
            next_id += 1
        output_len = _length(random_, 120, 800)
        yield Turn(at_s, num_tokens, output_len, list(ids))
        num_tokens += output_len
        at_s += output_len * 0.03 + random_.expovariate(1 / 40)


def _beginning(random_: random.Random) -> float:
    if random_.random() < _BURST_SHARE:
        return random_.uniform(*random_.choice(_BURSTS_S))
    return random_.uniform(0, _HOUR_S)


def _length(random_: random.Random, median: int, most: int) -> int:
    return min(most, max(4, round(median * random_.lognormvariate(0, 0.8))))


if __name__ == "__main__":
    FILE.write_text(chat_trace(), encoding="utf-8")
