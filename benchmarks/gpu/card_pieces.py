"""python -m benchmarks.gpu.card_pieces PIECE: what a campaign measures without a server, each in a process of its own.

Prints one JSON line, last. A piece may say that it can't be measured here; it raises nothing for that.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.step_plans import decode_step, prefill_steps, set_up
from benchmarks.gpu.bare_engine import BareEngine, EngineSize, steady_step_ms
from benchmarks.gpu.cache_steps import CacheSteps, Loads, with_cache
from benchmarks.gpu.lane_pieces import evict_first, share_table
from benchmarks.gpu.piece_command import Piece, run_named
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import GREEDY, device_ms
from replicas.settings import GrammarSettings
from scheduler.lane_split import LaneObjectives
from scheduler.memory_budget import num_blocks_for
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite

_GRAMMAR_THREADS = 6  # as in the configs for cards
_OBJECTIVES = LaneObjectives(ttft_s=0.4, token_gap_s=0.011)


def handoff(options: argparse.Namespace) -> dict[str, Any]:
    """Reads between two processes on the device: first, median and best, in ms, by MiB; then what a probe makes."""
    from benchmarks.gpu.handoff import MIB, HandoffPair

    sizes = (1, 2) if options.small else (2, 32, 256)
    block_mib = 1 if options.small else 2
    pair = HandoffPair(options.device, max(sizes) // block_mib + 1, block_mib * MIB)
    try:
        found: dict[str, Any] = {}
        for mib in sizes:
            times = pair.times(mib // block_mib, 3 if options.small else 40)
            pair.check(mib // block_mib)
            found[f"{mib}_mib_first_median_best_ms"] = [float(cell) for cell in times.row()[1:4]]
        rate = pair.probe()
    finally:
        pair.close()
    return found | {"probe_gb_per_s": round(rate.bytes_per_s / 1e9, 1), "probe_latency_ms": 1e3 * rate.latency_s}


def steps(options: argparse.Namespace, num_lanes: int) -> dict[str, Any]:
    """Mean ms of a decode step of the whole engine, nothing to prefill; then prompts alone.

    Prompts are computed beforehand and found in the cache: else the first rows would end before the last have begun,
    where rows go on beside prompts.
    """
    batches = (1, 4) if options.small else (1, 16, 48, 56, 64, 256)
    num_in, num_out = (20, 24) if options.small else (1009, 128)
    rng = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        top = 400 if options.small else 30_000
        return [[rng.randrange(100, top) for _ in range(length)] for _ in range(count)]

    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(max(batches), 256 if options.small else 9000, 2304, _capacity(options), device=options.device)
        lanes = _OBJECTIVES if num_lanes == 2 else None
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, lanes=lanes, prefixes=with_cache())
    found: dict[str, Any] = {"start_s": round(engine.start_s, 1)}
    with engine:
        engine.run(prompts(1, 64), [8], GREEDY)
        for batch in batches:
            asked = prompts(batch, num_in)
            engine.run(asked, [1] * batch, GREEDY)
            outputs = [200 if batch == 256 else num_out] * batch
            found[f"step_{batch}_ms"] = round(steady_step_ms(engine.run(asked, outputs, GREEDY)), 3)
        found["prefill_tokens_per_s"] = round(engine.engine.steps.prefill_tokens_per_s)
    return found


def shares(options: argparse.Namespace) -> dict[str, Any]:
    """What warm-up measures of each share of the card: both lanes' rates, as parts of what each has alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(
            8 if options.small else 64, 256 if options.small else 9000, 2304, _capacity(options), device=options.device
        )
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, lanes=_OBJECTIVES)
    return {
        "shares": [
            [share.num_processors, round(share.prefill_rate, 3), round(share.decode_rate, 3)]
            for share in engine.runner.shares
        ],
        "start_s": round(engine.start_s, 1),
    }


def logits(options: argparse.Namespace) -> dict[str, Any]:
    """Errors of both lanes' logits, in thousandths, beside transformers' own in bf16, as `benchmarks.gpu.logits`."""
    from benchmarks.gpu.logits import check

    lengths = (
        (5, 40, 100, 33, 64, 70) if options.small else (5, 1024, 100, 2048, 700, 64, 1500, 512, 4000, 300, 33, 768)
    )
    asked = argparse.Namespace(device=options.device, lanes=2, slack=0.1)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = check(options.shape, lengths, asked)
    everything = [way for way in found["ways"] if way["way"] == "all"]
    errors = [[round(way["ours mean"], 3), round(way["HF mean"], 3)] for way in everything]
    return {"is_good": found["is_good"], "ours_and_transformers": errors}


def chunks_of_long_prompts(options: argparse.Namespace) -> dict[str, Any]:
    """Ms of a prompt of 8,192, whole and in steps of so many tokens: what a lane's budget should be."""
    length = 200 if options.small else 8192
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(8, length + 64, length, _capacity(options), device=options.device)
        runner = BareEngine(str(folder), options.dtype, "dummy", size, 1).runner
    runner.prepare_thread(length)
    for step_tokens in (2048, 2304, 4096, 8192):
        budget = max(16, step_tokens * length // 8192)
        plans = prefill_steps([100 + index % 300 for index in range(length)], budget, runner.pool.layout.block_size)

        def once(plans: list[StepPlan] = plans) -> float:
            started_s = time.perf_counter()
            for handle in [runner.launch(plan) for plan in plans]:
                handle.result()
            return 1e3 * (time.perf_counter() - started_s)

        once()
        found[f"steps_of_{step_tokens}_ms"] = round(min(once() for _ in range(3)), 2)
    return found


def decode_attention(options: argparse.Namespace) -> dict[str, Any]:
    """GB/s of one layer's attention of rows, at the sizes and contexts where vLLM's steps are shorter."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    from benchmarks.gpu.kernel_times import decode_attention as measured

    rows = [measured([context] * batch) for batch in (16, 32, 48, 56, 64) for context in (600, 1073, 2112)]
    return {f"{row['batch']}x{row['longest']}": [round(row["ms"], 4), round(row["GB/s"])] for row in rows}


def long_prompts(options: argparse.Namespace) -> dict[str, Any]:
    """Attention of 4 fresh prompts of 8,192: cuDNN's, which we use, and FlashAttention 3, where vLLM brings it."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    count, length, heads, kv_heads, dim = 4, 8192, 32, 8, 128
    q = torch.randn(count, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(count, length, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 4 * count * heads * dim * length * length / 2
    found: dict[str, Any] = {}

    def noted(name: str, once: Callable[[], object]) -> None:
        ms = device_ms(once, 5)
        found[name] = {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9)}

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        views = [x.transpose(1, 2) for x in (q, k, v)]
        noted(
            "cudnn", lambda: torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
        )
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except Exception as error:
        return found | {"fa3": f"not measured: {error}"}
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    flat = [x.reshape(count * length, -1, dim) for x in (q, k, v)]
    noted(
        "fa3",
        lambda: flash_attn_varlen_func(
            *flat, max_seqlen_q=length, cu_seqlens_q=starts, max_seqlen_k=length, cu_seqlens_k=starts, causal=True,
            fa_version=3,
        ),
    )  # fmt: skip
    return found


def prompts_beside_rows(options: argparse.Namespace) -> dict[str, Any]:
    """One lane: ms of a step of a prompt of 2,048 alone, with 16, 32 and 64 rows beside it, and of these rows alone."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(128, 4096, 2304, _capacity(options), device=options.device)
        runner = BareEngine(str(folder), options.dtype, "dummy", size, 1).runner
    block_size, context = runner.pool.layout.block_size, 2112
    num_blocks = num_blocks_for(context + 1, block_size)
    found: dict[str, Any] = {}
    for batch in (16, 32, 64):
        blocks = tuple(range(batch * num_blocks, (batch + 1) * num_blocks))
        chunk = Slice.of_prompt("prompt", batch, 0, tuple(range(1000, 3048)), (SampleTarget(batch, 0),))
        runner.launch(set_up(batch, context, block_size, GREEDY)).result()
        inits, writes = (SlotInit(batch, 0, GREEDY, None),), (TableWrite(batch, 0, blocks),)
        runner.launch(StepPlan(0, inits, writes, (), (chunk,))).result()
        rows = decode_step(batch, context)
        plans = {
            "rows": rows,
            "prompt": replace(rows, slices=(chunk,)),
            "both": replace(rows, slices=(*rows.slices, chunk)),
        }
        for name, plan in plans.items():
            found[f"{batch}_{name}_ms"] = round(device_ms(partial(runner.launch, plan), 6), 3)
    return found


def masks(options: argparse.Namespace) -> dict[str, Any]:
    """Mean ms of decode steps of rows that a JSON schema holds, and of rows that nothing does; lag 1; masks alone."""
    from benchmarks.gpu.mask_steps import MaskSteps

    batches, num_in, num_out = ((4, 1), 20, 24) if options.small else ((64, 1, 256), 256, 192)
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name), options.tokenizer)
        size = EngineSize(max(batches), 1024, 2304, _capacity(options), device=options.device)
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, grammars=GrammarSettings(_GRAMMAR_THREADS))
    found: dict[str, Any] = {"start_s": round(engine.start_s, 1)}
    with engine:
        steps = MaskSteps(engine, num_in, 400 if options.small else 30_000)
        steps.step_ms(1, num_out, "greedy", 1)
        for batch in batches:
            is_main = batch == batches[0]
            for way in ("greedy", "sampled") if is_main else ("greedy",):
                for kind, step_ms in steps.step_ms(batch, num_out, way, 2 if is_main else 1).items():
                    found[f"{batch}_{way}_{kind}_ms"] = step_ms
        for num_threads in (1, 2, 4, _GRAMMAR_THREADS, 8):
            found[f"masks_{batches[0]}_threads_{num_threads}_ms"] = steps.mask_ms(batches[0], 96, num_threads)
    return found


def cache_steps(options: argparse.Namespace) -> dict[str, Any]:
    """What the prefix cache brings for a repeated prompt of 8,192, and what it costs where nothing is shared; lag 1."""

    loads = Loads((4, 1), 20, 24, (3, 100), 100, 2) if options.small else Loads()
    longest, step_tokens = (256, 64) if options.small else (9000, 2304)
    # Little more than the rows take: from the second run on a new block takes the place of a cached one.
    capacity = 1024 if options.small else 96_000
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(max(loads.rows), longest, step_tokens, capacity, device=options.device)
        cached = BareEngine(str(folder), options.dtype, "dummy", size, 1, prefixes=with_cache())
    plain, again = cached.beside(None), cached.beside(None)
    with cached, plain, again:
        steps = CacheSteps(cached, (plain, again), loads, 400 if options.small else 30_000)
        found = {"start_s": round(cached.start_s, 1), **steps.repeated(5)}
        found |= steps.nothing_shared()
    stats = cached.scheduler.prefixes.stats() if cached.scheduler.prefixes is not None else None
    return found | {"evicted_blocks": 0 if stats is None else stats.num_evicted_blocks}


def _capacity(options: argparse.Namespace) -> int:
    return 8192 if options.small else 400_000


PIECES: dict[str, Piece] = {
    "handoff": handoff,
    "steps-one": lambda options: steps(options, 1),
    "steps-two": lambda options: steps(options, 2),
    "shares": shares,
    "share-table": share_table,
    "evict-first": evict_first,
    "logits": logits,
    "chunks": chunks_of_long_prompts,
    "attention-rows": decode_attention,
    "attention-long": long_prompts,
    "prompt-beside-rows": prompts_beside_rows,
    "masks": masks,
    "cache-steps": cache_steps,
}


if __name__ == "__main__":
    run_named(PIECES, __doc__)
