"""What a server's prefix cache brings: one long prompt sent again, and chats whose turns build on each other.

The same client for ours and for vLLM: prompts of random token ids, and answers' ids as the server returns them. So the
next turn begins with exactly what the last one computed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.campaign_record import CampaignRecord, Line
from benchmarks.gpu.missing_kinds import Kind, measure_missing
from cluster.load.client import Client, OutgoingRequest, Target
from cluster.load.percentile import percentile
from cluster.load.request_record import RequestRecord
from cluster.load.workload import PromptMaker, Shape, TokenIds

KINDS = ("repeated", "chats")
_TOKEN_IDS = (1_000, 30_000)
_TIMEOUT_S = 60.0
_ABOUT_S = {"repeated": 6.0, "chats": 20.0}
_BODY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """num_repeated_in: tokens of the prompt that is sent again, num_warm times.

    Chats: so many at once, each with so many turns; its first prompt has num_first_in tokens, each later one the last
    prompt, its answer, and num_more_in. num_repeats: of all chats, with other tokens.
    """

    num_repeated_in: int = 8192
    num_warm: int = 5
    num_chats: int = 24
    num_turns: int = 6
    num_first_in: int = 1800
    num_more_in: int = 200
    num_out: int = 64
    num_repeats: int = 2

    def name(self, kind: str) -> str:
        return f"{self.num_repeated_in} again" if kind == "repeated" else f"{self.num_chats} chats x {self.num_turns}"


@dataclass(frozen=True, slots=True)
class Chats:
    """Turns of all chats, by their number in a chat, and how long one set of chats took."""

    turns: list[list[RequestRecord]]
    walls_s: list[float] = field(default_factory=list)


def measure_over_http(
    url: str, model: str, piece: str, load: CacheLoad, record: CampaignRecord, is_time_for: Callable[[float], bool]
) -> bool:
    """As `measure_missing`."""
    ways = {"repeated": _repeated, "chats": _chats}

    def measured(kind: str) -> Line:
        return asyncio.run(_with_client(Target(url, model), load, ways[kind]))

    kinds = [Kind(load.name(kind), _ABOUT_S[kind], partial(measured, kind)) for kind in KINDS]
    return measure_missing(piece, kinds, record, is_time_for)


def missing(piece: str, load: CacheLoad, record: CampaignRecord) -> list[str]:
    """Kinds that no line is there of."""
    return [kind for kind in KINDS if record.of(piece, load.name(kind)) is None]


async def _with_client(target: Target, load: CacheLoad, measure: Callable[[Client, CacheLoad], Any]) -> Line:
    client = Client(target, _TIMEOUT_S)
    try:
        line: Line = await measure(client, load)
    finally:
        client.close()
    return line


async def _repeated(client: Client, load: CacheLoad) -> Line:
    """Alone on the server. Another such prompt goes before, twice: what a server does once is not counted."""
    for _ in range(2):
        await _answer(client, _prompt(load.num_repeated_in, 0), 4)
    prompt = _prompt(load.num_repeated_in, 1)
    cold = await _answer(client, prompt, 4)
    warm = [await _answer(client, prompt, 4) for _ in range(load.num_warm)]
    _check_found(warm)
    ttfts_ms = [_ms(record.ttft_s) for record in warm]
    return {
        "cold_ttft_ms": _ms(cold.ttft_s),
        "warm_ttft_ms": round(median(ttfts_ms), 3),
        "warm_ttfts_ms": ttfts_ms,
        "cached_tokens": [record.num_cached_tokens for record in (cold, *warm)],
    }


async def _chats(client: Client, load: CacheLoad) -> Line:
    """Each chat's next turn goes out as soon as the last one's answer is here. Percentiles: of all repeats' turns."""
    chats = Chats([[] for _ in range(load.num_turns)])
    for repeat in range(load.num_repeats):
        started_s = time.monotonic()
        each = [_chat(client, load, 1000 * (repeat + 1) + number, chats.turns) for number in range(load.num_chats)]
        await asyncio.gather(*each)
        chats.walls_s.append(round(time.monotonic() - started_s, 3))
    later = [record for turn in chats.turns[1:] for record in turn]
    _check_found(later)
    everything = [*chats.turns[0], *later]
    line: Line = {"turns": len(everything), "wall_s": min(chats.walls_s), "walls_s": chats.walls_s}
    for name, records in (("first", chats.turns[0]), ("later", later)):
        for percent in (50, 90):
            ttfts_s = [record.ttft_s if record.ttft_s is not None else math.nan for record in records]
            line[f"{name}_p{percent}_ttft_ms"] = _ms(percentile(ttfts_s, percent))
    line["p90_tpot_ms"] = _ms(percentile([record.tpot_s for record in everything if record.tpot_s is not None], 90))
    return line | {"cached_share": _share(everything), "later_cached_share": _share(later)}


async def _chat(client: Client, load: CacheLoad, number: int, turns: list[list[RequestRecord]]) -> None:
    prompt = _prompt(load.num_first_in, number)
    for turn in range(load.num_turns):
        if turn:
            prompt = np.concatenate((prompt, _prompt(load.num_more_in, number, turn)))
        record = await _answer(client, prompt, load.num_out, {"return_token_ids": True})
        if len(record.output_ids) != load.num_out:
            raise RuntimeError(f"{len(record.output_ids)} ids of an answer's {load.num_out} tokens")
        turns[turn].append(record)
        prompt = np.concatenate((prompt, np.array(record.output_ids, dtype=np.int32)))


async def _answer(
    client: Client, prompt: TokenIds, num_out: int, options: dict[str, Any] | None = None
) -> RequestRecord:
    """Raises RuntimeError unless it succeeds."""
    request = OutgoingRequest(0, time.monotonic(), prompt, len(prompt), num_out, options=_BODY | (options or {}))
    record = await client.send(request)
    if record.error is not None:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens: {record.error}")
    return record


def _prompt(length: int, number: int, turn: int = 0) -> TokenIds:
    """Another one for each number and turn."""
    return PromptMaker(1 + turn, *_TOKEN_IDS).token_ids(number, Shape(length, 0))


def _check_found(records: list[RequestRecord]) -> None:
    """Raises RuntimeError where nothing was found: then there is no cache, or its server does not tell. vLLM leaves the
    field out when it is 0."""
    num_unfound = sum(not record.num_cached_tokens for record in records)
    if num_unfound == len(records):
        raise RuntimeError("no answer says that anything of its prompt was cached, and all were sent before")
    if num_unfound:
        print(f"of {num_unfound} of {len(records)} prompts that were sent before nothing was found", flush=True)


def _share(records: list[RequestRecord]) -> float:
    """Of all prompts' tokens, those that were cached."""
    num_in = sum(record.num_input_tokens for record in records)
    return round(sum(record.num_cached_tokens or 0 for record in records) / num_in, 4)


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else round(1e3 * seconds, 3)
