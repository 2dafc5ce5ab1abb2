"""One lane against two on one card, without HTTP: requests come at random times, latencies by the engine's own frames.

    python -m benchmarks.gpu.two_lanes --shape llama-3.1-8b.json --rates 4 8 12 [--layouts one two] [--out FILE.json]
    python -m benchmarks.gpu.two_lanes --shape qwen3-0.6b.json --equal      # the same texts in float32?

Weights are random. With `--device cpu` and a tiny shape it can be tried anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize, TimedTokens
from benchmarks.gpu.shape_folder import make_shape_folder
from replicas.messages import CallStatus, GenerateCall, GenerateReply, GenerationSpec
from replicas.metrics.lane_clock import LaneClock
from scheduler.lane_split import LaneObjectives
from scheduler.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_OBJECTIVES = LaneObjectives(ttft_s=0.4, token_gap_s=0.011)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_poisson(
    engine: BareEngine, rate: float, count: int, num_in: int, num_out: int, vocab_size: int
) -> dict[str, float]:
    """Latencies in ms of `count` requests that come at this rate, each with a prompt of its own. Blocks."""
    rng = random.Random(rate)
    channel: Any = SimpleNamespace(router_id="benchmark")
    waiting: list[tuple[str, float, Future[GenerateReply]]] = []
    next_s = time.perf_counter()
    for number in range(count):
        next_s += rng.expovariate(rate)
        time.sleep(max(0.0, next_s - time.perf_counter()))
        prompt = tuple(rng.randrange(vocab_size) for _ in range(num_in))
        request_id = f"{rate}-{number}"
        engine.sender.streams[request_id] = TimedTokens()
        spec = GenerationSpec(prompt, (0,), num_out, frozenset(), _GREEDY)
        call = GenerateCall(request_id, spec, 600.0, channel, source=None)
        waiting.append((request_id, time.perf_counter(), engine.engine.generate(call)))
    streams = []
    for request_id, came_s, future in waiting:
        reply = future.result(600)
        if reply.status is not CallStatus.OK:
            raise RuntimeError(f"{reply.status}: {reply.detail}")
        streams.append((came_s, engine.sender.streams.pop(request_id).times_s))
    ttft = [1e3 * (times[0] - came_s) for came_s, times in streams]
    tpot = [1e3 * (times[-1] - times[0]) / (len(times) - 1) for _, times in streams]
    gaps = [1e3 * (b - a) for _, times in streams for a, b in pairwise(times)]
    figures = {}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", gaps)):
        for share in (0.5, 0.9, 0.99):
            figures[f"{name}_p{share * 100:.0f}_ms"] = round(percentile(values, share), 2)
    figures["itl_max_ms"] = round(max(gaps), 1)
    return figures


def lanes_of(engine: BareEngine) -> dict[str, Any]:
    clock = engine.engine.steps
    if not isinstance(clock, LaneClock):
        return {"step_ms": round(1e3 * clock.mean_s, 2), "steps": clock.num_steps}
    return {
        "steps": dict(clock.num_lane_steps),
        "busy_s": {lane: round(busy_s, 2) for lane, busy_s in clock.lane_busy_s.items()},
        "whole_card_decode_step_ms": round(1e3 * clock.rates.decode_step_s, 2),
        "whole_card_tokens_per_s": round(clock.rates.prefill_tokens_per_s),
        "prompt_steps_by_processors": {str(count): steps for count, steps in clock.num_steps_by_processors.items()},
    }


def make_engine(folder: Path, options: argparse.Namespace, has_two_lanes: bool, dtype: str) -> BareEngine:
    size = EngineSize(
        options.sequences, options.model_len, options.step_tokens, options.capacity_tokens, device=options.device
    )
    lanes = _OBJECTIVES if has_two_lanes else None
    return BareEngine(str(folder), dtype, "dummy", size, options.lag, lanes=lanes)


def measure(folder: Path, options: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    lines = []
    for layout in options.layouts:
        with make_engine(folder, options, layout == "two", options.dtype) as engine:
            print(json.dumps({"layout": layout, "start_s": round(engine.start_s, 1), **memory_of(options)}), flush=True)
            run_poisson(engine, 20.0, 8, options.tokens_in, 8, vocab_size)  # whatever is still to be prepared
            for rate in options.rates:
                figures = run_poisson(engine, rate, options.count, options.tokens_in, options.tokens_out, vocab_size)
                lines.append({"layout": layout, "rate": rate, **figures, **lanes_of(engine)})
                print(json.dumps(lines[-1]), flush=True)
        del engine
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return lines


def memory_of(options: argparse.Namespace) -> dict[str, float]:
    if options.device != "cuda":
        return {}
    return {"free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 2)}


def compare_texts(folder: Path, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """In float32 the same weights say the same, whichever lane computes them, whatever runs beside."""
    rng = random.Random(7)
    lengths = [rng.choice([5, 40, 200, 700, 1500, 3500]) for _ in range(options.count)]
    lengths = [min(length, options.model_len - 70) for length in lengths]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    outputs = [rng.randint(16, 64) for _ in lengths]
    texts = []
    for layout in ("one", "two"):
        torch.manual_seed(0)
        with make_engine(folder, options, layout == "two", "float32") as engine:
            runs = [[stream.tokens for stream in engine.run(prompts, outputs, _GREEDY)] for _ in range(2)]
            texts.append(runs)
        del engine
        gc.collect()
    same = [sum(a == b for a, b in zip(texts[0][0], other, strict=True)) for other in (texts[0][1], *texts[1])]
    return {"texts": len(prompts), "one lane again": same[0], "two lanes": same[1], "two lanes again": same[2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="a config.json under any name")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 12.0])
    parser.add_argument("--layouts", nargs="+", choices=["one", "two"], default=["one", "two"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tokens-in", type=int, default=2048)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--equal", action="store_true", help="compare texts instead")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--model-len", type=int, default=8192)
    parser.add_argument("--step-tokens", type=int, default=2304)
    parser.add_argument("--capacity-tokens", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(4)  # as the engine's threads have: what is compiled here holds there
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        vocab_size = json.loads(options.shape.read_text())["vocab_size"]
        found: Any = (
            compare_texts(folder, options, vocab_size) if options.equal else measure(folder, options, vocab_size)
        )
    if options.equal:
        print(json.dumps(found), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
