"""The engine benchmark from start to end, as data and as tables."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.engine.bench_settings import engine_settings
from benchmarks.engine.engine_streams import EngineStreams
from benchmarks.engine.reference_model import ReferenceModel
from benchmarks.engine.sampling_times import WAYS, sampling_times
from benchmarks.engine.step_times import decode_step_times, prefill_times
from benchmarks.engine.stream_ratios import concurrent_streams, single_stream_ratio
from cluster.load.tables import table
from replicas.serving.engine_builder import build_engine

_STEP_TOKENS = 512
_KV_TOKENS = 17_408  # 16 sequences of 1024 tokens and some
_NUM_STREAMS = 16


def run_engine_benchmark(num_threads: int, short: bool) -> dict[str, Any]:
    """Builds one engine and one reference model with as many threads: 3 GiB. Blocks for a minute or more."""
    settings = engine_settings(num_threads, _STEP_TOKENS, _KV_TOKENS)
    built = build_engine(settings, "benchmark")
    reference = ReferenceModel(settings.model.source)
    torch.set_num_threads(num_threads)
    repeats = 10 if short else 30
    runner = built.engine.runner  # used here only before its engine's thread starts
    result: dict[str, Any] = {
        "threads": num_threads,
        "decode_steps": decode_step_times(runner, [1, 4, 16], [128, 512, 1008], repeats),
        "prefill": prefill_times(runner, reference, [64, 256, 512, 1024], _STEP_TOKENS, 2 if short else 5),
        "sampling": sampling_times(reference.vocab_size, [1, 16, 64], repeats),
    }
    built.start()
    try:
        with EngineStreams(built.engine) as streams:
            result["single_stream"] = single_stream_ratio(streams, reference, 64, 48, 3 if short else 7)
            result["concurrent"] = concurrent_streams(streams, _NUM_STREAMS, 32, 48, 1 if short else 3)
    finally:
        built.stop()
    return result


def engine_tables(result: dict[str, Any]) -> str:
    """For people."""
    decode = _rows(result["decode_steps"], batch="d", context="d", step_ms=".1f", slowest_ms=".1f", tokens_per_s=".1f")
    prefill = _rows(result["prefill"], length="d", tokens_per_s=".0f", transformers_tokens_per_s=".0f", ratio=".2f")
    sampling = _rows(result["sampling"], batch="d", **dict.fromkeys(WAYS, ".2f"))
    single, many = result["single_stream"], result["concurrent"]
    return "\n\n".join(
        [
            f"engine, {result['threads']} thread(s)",
            table(["decode batch", "context", "step ms", "slowest", "tok/s"], decode),
            table(["prompt tokens", "tok/s", "transformers", "ratio"], prefill),
            "what choosing tokens adds to a step, ms",
            table(["batch", *WAYS], sampling),
            f"single stream: {single['tokens_per_s']:.1f} tok/s, transformers.generate "
            f"{single['transformers_tokens_per_s']:.1f}; ratio {single['ratio']:.2f} "
            f"(rounds {single['ratios']}, same tokens: {single['same_tokens']})",
            f"{many['streams']} streams: {many['tokens_per_s']:.1f} tok/s while all decode, "
            f"{many['tokens_per_s_with_prefill']:.1f} from the first token to the last; one stream: "
            f"{many['single_tokens_per_s']:.1f}; ratio {many['ratio']:.2f}",
        ]
    )


def _rows(measured: list[dict[str, Any]], **formats: str) -> list[list[str]]:
    return [[format(row[name], form) for name, form in formats.items()] for row in measured]
