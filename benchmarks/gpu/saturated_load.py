"""How long decode's steps are while prefill is saturated: the gaps of some long streams, alone and beside prompts.

    alone     16 streams                        |t t t t t t t t t ...
    prompts   beside them 8 prompts at a time, of one token: prefill is never idle, and nothing is handed over
    handoffs  the same with two tokens: each one's KV goes to where the streams are, and it has a row there for a step

Only gaps count in which all streams are at work, and where there are prompts, as many of these as there should be.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.gpu.campaign_record import CampaignRecord, Line
from benchmarks.gpu.missing_kinds import Kind, measure_missing
from cluster.load.client import Client, OutgoingRequest, Target
from cluster.load.percentile import percentile
from cluster.load.request_record import RequestRecord
from cluster.load.workload import PromptMaker, Shape

KINDS = {"alone": 0, "prompts": 1, "handoffs": 2}  # tokens of each prompt's answer
# The most that a step may be longer beside prompts.
TO_REACH = 1.02
HEAD = ("saturated prefill", "step (gap p99) alone, ms", "beside it", "times", "prompts, token/s", "to reach", "")
_TOKEN_IDS = (1_000, 30_000)
_TIMEOUT_S = 60.0
_ABOUT_S = 15.0  # of one kind: half as long again where an engine has prompts between its steps
_BODY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class SaturatedLoad:
    """Streams of num_in tokens and num_out more; beside them num_prompts at a time, of num_prompt_in tokens."""

    num_streams: int = 16
    num_in: int = 1000
    num_out: int = 500
    num_prompts: int = 8
    num_prompt_in: int = 2048

    def name(self, kind: str) -> str:
        return f"{self.num_streams} rows {kind}"


def measure_over_http(
    url: str, model: str, piece: str, load: SaturatedLoad, record: CampaignRecord, is_time_for: Callable[[float], bool]
) -> bool:
    """As `measure_missing`."""

    def measured(kind: str) -> Line:
        return asyncio.run(_measured(Target(url, model), load, kind))

    kinds = [Kind(load.name(kind), _ABOUT_S, partial(measured, kind)) for kind in KINDS]
    return measure_missing(piece, kinds, record, is_time_for)


def missing(piece: str, load: SaturatedLoad, record: CampaignRecord) -> list[str]:
    """Kinds that no line is there of."""
    return [kind for kind in KINDS if record.of(piece, load.name(kind)) is None]


def saturated_rows(record: CampaignRecord, verdict: Callable[[float, float], str]) -> list[list[Any]]:
    """Cells of a table under HEAD. verdict: of a figure, and the most that it may be; of split pools only."""
    rows = []
    for alone in [line for line in record.lines if str(line.get("workload")).endswith(" rows alone")]:
        for kind in list(KINDS)[1:]:
            workload = alone["workload"].removesuffix("alone") + kind
            if (line := record.of(alone["piece"], workload)) is None:
                continue
            times = line["mean_step_ms"] / alone["mean_step_ms"]
            steps = [f"{of['mean_step_ms']:g} ({of['p99_itl_ms']:g})" for of in (alone, line)]
            judged = [f"{TO_REACH:g}", verdict(times, TO_REACH)] if "split" in alone["piece"] else ["-", ""]
            cells = [*steps, f"{times:.3f}", f"{line['prompt_tokens_per_s']:g}"]
            rows.append([f"{alone['piece']}, {workload}", *cells, *judged])
    return rows


async def _measured(target: Target, load: SaturatedLoad, kind: str) -> Line:
    """Raises RuntimeError where a request fails, or where there is no time in which all are at work."""
    client = Client(target, _TIMEOUT_S)
    prompts: list[RequestRecord] = []
    over = asyncio.Event()
    streams = [asyncio.create_task(_answer(client, load.num_in, load.num_out, n)) for n in range(load.num_streams)]
    feeders = [
        asyncio.create_task(_feed(client, load, KINDS[kind], n, prompts, over))
        for n in range(load.num_prompts if KINDS[kind] else 0)
    ]
    try:
        done = await asyncio.gather(*streams)
    finally:
        over.set()
        ends = await asyncio.gather(*feeders, return_exceptions=True)
        client.close()
    for end in ends:
        if isinstance(end, Exception):
            raise end
    begin_s = max(record.token_times_s[0] for record in done)
    end_s = min(record.token_times_s[-1] for record in done)
    return _steps(done, begin_s, end_s) | _prompts(prompts, load, begin_s, end_s, has_any=bool(KINDS[kind]))


def _steps(streams: list[RequestRecord], begin_s: float, end_s: float) -> Line:
    """Gaps that lie within that time."""
    inside = [[t for t in record.token_times_s if begin_s <= t <= end_s] for record in streams]
    if min(len(times) for times in inside) < 3:
        raise RuntimeError("the streams were not at work at one time: more tokens for each")
    gaps_ms = [1e3 * (later - earlier) for times in inside for earlier, later in pairwise(times)]
    means = [(times[-1] - times[0]) / (len(times) - 1) for times in inside]
    line: Line = {"mean_step_ms": round(1e3 * sum(means) / len(means), 3)}
    for percent in (50, 90, 99):
        line[f"p{percent}_itl_ms"] = round(percentile(gaps_ms, percent), 3)
    return line | {"max_itl_ms": round(max(gaps_ms), 3), "seconds": round(end_s - begin_s, 2)}


def _prompts(
    prompts: list[RequestRecord], load: SaturatedLoad, begin_s: float, end_s: float, has_any: bool
) -> dict[str, float]:
    """What was computed of them in that time. Raises RuntimeError if nothing was, where something should be."""
    ended = [record for record in prompts if begin_s <= record.ended_s <= end_s]
    if has_any and not ended:
        raise RuntimeError("no prompt was computed beside the streams")
    seconds = end_s - begin_s
    ttfts_ms = [1e3 * record.ttft_s for record in ended if record.ttft_s is not None]
    return {
        "prompts": len(ended),
        "prompt_tokens_per_s": round(len(ended) * load.num_prompt_in / seconds) if seconds > 0 else 0,
        "p50_prompt_ttft_ms": round(percentile(ttfts_ms, 50), 1) if ttfts_ms else math.nan,
    }


async def _feed(
    client: Client, load: SaturatedLoad, num_out: int, number: int, done: list[RequestRecord], over: asyncio.Event
) -> None:
    """One prompt after the other until it is over. Raises as `_answer`."""
    turn = 0
    while not over.is_set():
        turn += 1
        done.append(await _answer(client, load.num_prompt_in, num_out, number, turn))


async def _answer(client: Client, num_in: int, num_out: int, number: int, turn: int = 0) -> RequestRecord:
    """Other tokens for each number and turn. Raises RuntimeError unless it succeeds."""
    prompt = PromptMaker(1 + turn, *_TOKEN_IDS).token_ids(number, Shape(num_in, 0))
    record = await client.send(OutgoingRequest(0, time.monotonic(), prompt, num_in, num_out, options=_BODY))
    if record.error is not None:
        raise RuntimeError(f"a prompt of {num_in} tokens: {record.error}")
    return record
