"""python -m benchmarks.gpu.goldens MODEL [REQUESTS]: real text on the card, token for token.

The golden prompts of tests/golden in float32 against what transformers generated on a CPU; then REQUESTS of them at
once with too little KV memory, so that many give way to host memory and come back.
MODEL is a folder or a GGUF (SmolLM2-135M-Instruct, which the goldens are of).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from benchmarks.gpu.bare_engine import BareEngine, EngineSize, TimedTokens
from benchmarks.gpu.step_times import GREEDY
from replicas.gguf.conversion import resolve_source
from scheduler.sampling_params import SamplingParams

_GOLDENS = Path(__file__).parents[2] / "tests" / "golden" / "golden.json"
_CACHE = "/tmp/splitserve-cache"


def run_all(engine: BareEngine, prompts: list[list[int]], length: int, sampling: SamplingParams) -> list[list[int]]:
    streams: list[TimedTokens] = engine.run(prompts, [length] * len(prompts), sampling)
    return [stream.tokens for stream in streams]


def exactness(folder: str, lag: int) -> None:
    entries = json.loads(_GOLDENS.read_text())["entries"]
    prompts = [entry["prompt_ids"] for entry in entries]
    size = EngineSize(max_sequences=64, max_model_len=2048, max_step_tokens=512, capacity_tokens=100_000)
    with BareEngine(folder, "float32", "auto", size, lag) as engine:
        print(f"lag {lag}: self-check difference {engine.self_check_difference:.2e}, ready in {engine.start_s:.1f} s")
        generated = run_all(engine, prompts, 64, GREEDY)
        alone = [run_all(engine, [prompt], 64, GREEDY)[0] for prompt in prompts[:8]]
    equal = sum(got == entry["output_ids"] for got, entry in zip(generated, entries, strict=True))
    print(f"lag {lag}: {equal} of {len(entries)} golden prompts equal to transformers, float32, greedy, together")
    print(f"lag {lag}: {sum(a == b for a, b in zip(alone, generated, strict=False))} of 8 equal alone and together")
    for got, entry in zip(generated, entries, strict=True):
        if got != entry["output_ids"]:
            at = next(i for i, (a, b) in enumerate(zip(got, entry["output_ids"], strict=True)) if a != b)
            print(f"  {entry['name']}: differs at token {at}, where the reference's margin is {entry['margins'][at]}")


def preemption(folder: str, num_requests: int) -> None:
    entries = json.loads(_GOLDENS.read_text())["entries"]
    rng = random.Random(0)
    chosen = [rng.randrange(len(entries)) for _ in range(num_requests)]
    size = EngineSize(
        max_sequences=64, max_model_len=2048, max_step_tokens=512, capacity_tokens=4096, num_host_blocks=1024,
        quantile=0.05,
    )  # fmt: skip
    with BareEngine(folder, "float32", "auto", size) as engine:
        estimator = engine.scheduler.budget.estimator
        for _ in range(100):  # outputs were very short so far: admission takes too many
            estimator.observe(4)  # type: ignore[union-attr]
        outputs = run_all(engine, [entries[i]["prompt_ids"] for i in chosen], 64, GREEDY)
        num_swapped = engine.scheduler.preemption.num_swapped
    equal = sum(got == entries[i]["output_ids"] for got, i in zip(outputs, chosen, strict=True))
    print(f"{num_requests} golden requests, {num_swapped} preemptions to host memory: {equal} equal to transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("num_requests", type=int, nargs="?", default=1000)
    arguments = parser.parse_args()
    folder = resolve_source(arguments.model, _CACHE)
    for lag in (1, 0):
        exactness(folder, lag)
    preemption(folder, arguments.num_requests)


if __name__ == "__main__":
    main()
