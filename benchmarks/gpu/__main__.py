"""python -m benchmarks.gpu PARTS --shapes FOLDER [--out FILE.json]: the engine's figures on one card.

PARTS, comma-separated: kernels (with tiles: other tiles too),
llama-3.1-8b, qwen3-0.6b (with profile: of steps). A shape's name is a .json of FOLDER; its weights are random.
Prints tables; FILE gets everything as JSON. See benchmarks/RESULTS.md for what was predicted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize, steady_step_ms
from benchmarks.gpu.step_times import GREEDY, SAMPLED, decode_ms, launch_cpu_us, prefill_ms, prefill_plan, table

_BATCHES = (1, 16, 64, 256)


def kernels(with_tiles: bool) -> dict[str, Any]:
    from benchmarks.gpu import card_limits
    from benchmarks.gpu import kernel_times as times

    limits = {"bandwidths": card_limits.bandwidths(), "products": card_limits.products()}
    print(limits["bandwidths"])
    print(table(limits["products"]))
    rng = random.Random(3)
    uniform = [[context] * batch for batch, context in ((1, 1073), (16, 1073), (64, 1073), (256, 1073), (1, 32768))]
    mixed = [[rng.randrange(100, 2048) for _ in range(batch)] for batch in (40, 140)]
    decode = [times.decode_attention(contexts, heads) for contexts in (*uniform, *mixed) for heads in (32, 16)]
    if with_tiles:
        tiles = ((64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 3), (32, 4, 4), (64, 8, 3), (32, 2, 4))
        decode += [times.decode_attention([1073] * 64, 32, None, tile) for tile in tiles]
        decode += [times.decode_attention([1073] * 16, 32, n, None) for n in (33, 66, 99)]
    print(table(decode))
    products = times.single_row_products()
    print(table(products))
    prefill = [times.prefill_attention(length) for length in (2048, 8192)]
    print(table(prefill))
    behind = [times.attention_behind(earlier) for earlier in (2048, 4096, 6144, 14_336)]
    print(table(behind))
    draws = [times.token_draws(batch, 128_256) for batch in (1, 16, 64, 256)]
    print(table(draws))
    return {
        "limits": limits,
        "decode_attention": decode,
        "products": products,
        "prefill_attention": prefill,
        "attention_behind": behind,
        "token_draws": draws,
    }


def shape(folder: Path, name: str, parts: set[str]) -> dict[str, Any]:
    """Everything of one model's shape: start, steps, prefill, the whole engine."""
    with tempfile.TemporaryDirectory() as model_folder:
        shutil.copy(folder / f"{name}.json", Path(model_folder) / "config.json")
        size = EngineSize(max_sequences=256, max_model_len=33_024, max_step_tokens=32_768)
        built = BareEngine(model_folder, "bfloat16", "dummy", size)
    result: dict[str, Any] = {
        "load_s": built.load_s,
        "start_s": built.start_s,
        "pool_tokens": built.runner.pool.num_blocks * size.block_size,
        "self_check_difference": built.self_check_difference,
    }
    print(name, result)
    steps = []
    for batch in _BATCHES:
        greedy = decode_ms(built.runner, batch, 1073, GREEDY)
        sampled = decode_ms(built.runner, batch, 1073, SAMPLED)
        steps.append(
            {"batch": batch, "greedy_ms": greedy, "sampled_ms": sampled, "sampled_costs": sampled / greedy - 1,
             "launch_us": launch_cpu_us(built.runner, batch, 1073)}
        )  # fmt: skip
    print(table(steps))
    prefills = []
    for count, length in ((1, 512), (1, 2048), (16, 2048), (4, 8192), (1, 700)):
        ms = prefill_ms(built.runner, count, length)
        prefills.append({"prompts": f"{count}x{length}", "ms": ms, "tokens_per_s": 1000 * count * length / ms})
    print(table(prefills))
    result |= {"steps": steps, "prefill": prefills}
    if "profile" in parts:
        profile_steps(built)
    with built:
        result |= whole_engine(built)
    return result


def profile_steps(built: BareEngine) -> None:
    """Where the device time of decode steps goes, and of a prompt step."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.engine.step_plans import decode_step, set_up

    steps = [(f"batch {batch}", set_up(batch, 1073, 16), decode_step(batch, 1073)) for batch in (1, 64)]
    prompts = prefill_plan(8, 2048, 16)
    steps.append(("prompts 8x2048", prompts, replace(prompts, slot_inits=(), table_writes=())))
    for name, first, step in steps:
        built.runner.launch(first).result()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            for _ in range(5):
                built.runner.launch(step)
            torch.cuda.synchronize()
        print(name)
        print(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))


def whole_engine(built: BareEngine) -> dict[str, Any]:
    rng = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1_000, 30_000) for _ in range(length)]

    built.run([prompt(64)], [8], GREEDY)
    rows = []
    for batch in _BATCHES:
        outputs = 200 if batch == 256 else 128
        streams = built.run([prompt(1009) for _ in range(batch)], [outputs] * batch, GREEDY)
        rows.append({"batch": batch, "engine_step_ms": steady_step_ms(streams)})
    print(table(rows))
    lengths = [(rng.randrange(100, 1025), rng.randrange(100, 1025)) for _ in range(256)]
    import time

    started_s = time.perf_counter()
    streams = built.run([prompt(n) for n, _ in lengths], [n for _, n in lengths], GREEDY)
    offline_s = time.perf_counter() - started_s
    offline = sum(len(stream.tokens) for stream in streams) / offline_s
    print(f"offline, 256 requests U(100,1024) in and out: {offline:.0f} output tok/s in {offline_s:.1f} s")
    return {"engine_steps": rows, "offline_tokens_per_s": offline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts")
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parts = set(arguments.parts.split(","))
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(results)
    for part in sorted(parts - {"profile", "tiles"}):
        try:
            results[part] = kernels("tiles" in parts) if part == "kernels" else shape(arguments.shapes, part, parts)
        except Exception:
            traceback.print_exc()
            results[part] = "failed"
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
