"""From a recorded workload to what simulated clients ask for. Pure and seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.load.traces import TraceEntry
from cluster.simulation.client import Job

# A copy of a request comes within so many seconds of it, before or after: bursts stay bursts, and no two are twins.
_SPREAD_S = 10.0
# Above all hash ids of a recorded workload.
_COPY_STRIDE = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is made to fit the system.

    rate: 2.5 sends every request twice and every second one a third time, in the same time; 0.5 leaves out every
    second one: by chance, but the first copy keeps its time. length: a factor on prompts and outputs. max_tokens: what
    every client asks for, though its answer stops at the trace's length; None: exactly that length. acceptance: of
    drafts, as a Job has it.
    """

    rate: float = 1.0
    length: float = 1.0
    max_requests: int | None = None
    duration_s: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    acceptance: tuple[float, float] = (0.0, 0.0)


def trace_jobs(entries: Sequence[TraceEntry], scale: TraceScale, max_model_len: int) -> list[Job]:
    """By arrival, the first at 0 (or where its copy came to lie). Raises ValueError for an impossible scale."""
    if not (scale.rate > 0 and math.isfinite(scale.rate)):
        raise ValueError(f"the rate scale must be above 0, not {scale.rate}")
    if not (scale.length > 0 and math.isfinite(scale.length)):
        raise ValueError(f"the length scale must be above 0, not {scale.length}")
    entries = sorted(entries, key=lambda entry: entry.timestamp_s)
    first_s = entries[0].timestamp_s if entries else 0.0
    if scale.duration_s is not None:
        entries = [entry for entry in entries if entry.timestamp_s - first_s < scale.duration_s]
    length_s = entries[-1].timestamp_s - first_s if entries else 0.0
    copies = sorted(_copies(entries, first_s, length_s, scale), key=lambda copy: copy[0])[: scale.max_requests]
    return [_job(index, *copy, scale, max_model_len) for index, copy in enumerate(copies)]


def _copies(
    entries: Sequence[TraceEntry], first_s: float, length_s: float, scale: TraceScale
) -> Iterator[tuple[float, TraceEntry, int]]:
    """When it arrives, what it is a copy of, and the how manieth."""
    rng = random.Random(f"copies {scale.seed}")
    whole, part = math.floor(scale.rate), scale.rate % 1
    for entry in entries:
        time_s = entry.timestamp_s - first_s
        count = whole + (rng.random() < part if part else 0)
        for copy in range(count):
            # What would come before the first or after the last comes at the other end: no pile at either.
            is_moved = copy and length_s
            yield (time_s + rng.uniform(-_SPREAD_S, _SPREAD_S)) % length_s if is_moved else time_s, entry, copy


def _job(index: int, arrival_s: float, entry: TraceEntry, copy: int, scale: TraceScale, max_model_len: int) -> Job:
    # A prompt leaves room for one token, an answer is cut to what the prompt leaves.
    prompt_len = max(1, min(round(entry.input_len * scale.length), max_model_len - 1))
    room = max_model_len - prompt_len
    output_len = max(1, min(round(entry.output_len * scale.length), room))
    max_tokens = output_len if scale.max_tokens is None else min(scale.max_tokens, room)
    # Copies share with each other what the recorded requests share, and nothing with those.
    hash_ids = tuple([hash_id + copy * _COPY_STRIDE for hash_id in entry.hash_ids])
    block_tokens = max(1, round(entry.block_tokens * scale.length))
    return Job(
        index, arrival_s, prompt_len, min(output_len, max_tokens), max_tokens, hash_ids, block_tokens, scale.acceptance
    )
