"""Single stream against `transformers.generate`, and sixteen streams against one, in turns within one run."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.engine.engine_streams import EngineStreams, Stream, steady_tokens_per_s
from benchmarks.engine.reference_model import ReferenceModel
from benchmarks.engine.step_plans import GREEDY


def single_stream_ratio(
    streams: EngineStreams, reference: ReferenceModel, prompt_len: int, max_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Tokens a second after the first token, of both, round by round. The same prompts, greedy."""
    rows = []
    for index in range(-1, num_rounds):
        (prompt,) = _prompts(1, prompt_len, seed=index)
        tokens, times_s = reference.generate(prompt, max_tokens)
        theirs = Stream(tokens, times_s)
        (ours,) = streams.run([prompt], max_tokens, GREEDY)
        if index >= 0:  # the first pass is not counted
            rows.append((ours.tokens_per_s, theirs.tokens_per_s, ours.tokens == theirs.tokens))
    return {
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
        "rounds": num_rounds,
        "tokens_per_s": statistics.median(ours for ours, _, _ in rows),
        "transformers_tokens_per_s": statistics.median(theirs for _, theirs, _ in rows),
        "ratio": statistics.median(ours / theirs for ours, theirs, _ in rows),
        "ratios": [round(ours / theirs, 3) for ours, theirs, _ in rows],
        "same_tokens": all(same for _, _, same in rows),
    }


def concurrent_streams(
    streams: EngineStreams, num_streams: int, prompt_len: int, max_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Tokens a second of many streams to those of one, in turns. all: while every stream decodes."""
    ones, manies, totals = [], [], []
    for index in range(num_rounds):
        prompts = _prompts(num_streams, prompt_len, seed=100 + index)
        (one,) = streams.run(prompts[:1], max_tokens, GREEDY)
        many = streams.run(prompts, max_tokens, GREEDY)
        ones.append(one.tokens_per_s)
        manies.append(steady_tokens_per_s(many))
        totals.append(num_streams * max_tokens / (max(s.times_s[-1] for s in many) - min(s.times_s[0] for s in many)))
    return {
        "streams": num_streams,
        "single_tokens_per_s": statistics.median(ones),
        "tokens_per_s": statistics.median(manies),
        "tokens_per_s_with_prefill": statistics.median(totals),
        "ratio": statistics.median(many / one for many, one in zip(manies, ones, strict=True)),
    }


def _prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(f"prompts {seed}")
    return [[rng.randrange(1_000, 30_000) for _ in range(length)] for _ in range(count)]
