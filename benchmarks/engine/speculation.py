"""Drafts by n-grams on the CPU: text that repeats itself, and text in which nothing is found, with and without.

    python -m benchmarks.engine.speculation [--rounds 5] [--threads 1] [--output FILE]

Two engines of the bundled model in one process, in turns: one as ever, one with speculative.method ngram. Times are CPU
seconds of the process, as a machine that others use has no others worth a per cent.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.engine.bench_settings import engine_settings
from benchmarks.engine.engine_streams import EngineStreams
from benchmarks.engine.step_plans import GREEDY
from cluster.load.machine import describe_machine, machine_line
from cluster.load.tables import table
from replicas.serving.engine_builder import BuiltEngine, build_engine
from replicas.settings import SpeculationSettings
from scheduler.sampling_params import SamplingParams

_STEP_TOKENS = 512
_KV_TOKENS = 4_096
_SAMPLED = SamplingParams(temperature=1.0, seed=7)
_RECORDS = [("anna", 31, "lisbon"), ("bert", 44, "oslo"), ("carl", 27, "turin"), ("dora", 58, "ghent")]


def repetitive_texts() -> dict[str, str]:
    """As code edits and extraction are: much of the answer stands in the prompt, or in the answer before."""
    rows = "\n".join(f'{{"name": "{name}", "age": {age}, "city": "{city}"}}' for name, age, city in _RECORDS)
    code = "\n".join(
        f"def get_{name}(self):\n    value = self._values['{name}']\n    return value\n" for name, _, _ in _RECORDS
    )
    return {
        "records": f"These are the records.\n{rows}\nThe same records again.\n{rows}\nThe same records again.\n",
        "code": f"class Values:\n{code}\nclass Copy:\n{code}\nclass Other:\n",
        "list": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9,",
    }


class Turns:
    """The engines' streams, by name."""

    def __init__(self, engines: dict[str, BuiltEngine], streams: dict[str, EngineStreams]) -> None:
        self._engines, self._streams = engines, streams

    def compare(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: SamplingParams, num_rounds: int
    ) -> dict[str, Any]:
        """CPU milliseconds a token, of both; how many tokens a row brought with drafts. The texts are the same."""
        costs: dict[str, list[float]] = {name: [] for name in self._engines}
        texts: dict[str, list[list[int]]] = {}
        batch = self._engines["drafts"].engine.scheduler.batch
        clock = self._engines["drafts"].engine.steps
        rows_before, tokens_before = clock.num_rows, batch.num_forwarded_tokens
        for index in range(-1, num_rounds):
            for name in random.Random(index).sample(list(self._engines), 2):
                started_s = time.process_time()
                streams = self._streams[name].run(prompts, max_tokens, sampling)
                cost_s = time.process_time() - started_s
                texts[name] = [stream.tokens for stream in streams]
                if index >= 0:  # the first pass is not counted: prompts are in the cache afterwards
                    costs[name].append(1e3 * cost_s / (len(prompts) * max_tokens))
        ratios = [plain / drafts for plain, drafts in zip(costs["plain"], costs["drafts"], strict=True)]
        return {
            "plain_ms": statistics.median(costs["plain"]),
            "drafts_ms": statistics.median(costs["drafts"]),
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "tokens_a_row": (batch.num_forwarded_tokens - tokens_before) / max(1, clock.num_rows - rows_before),
            "same_text": texts["plain"] == texts["drafts"],
        }


def run(num_threads: int, num_rounds: int, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Blocks for some minutes; 2 GiB."""
    settings = engine_settings(num_threads, _STEP_TOKENS, _KV_TOKENS)
    drafting = replace(settings, speculative=SpeculationSettings("ngram"))
    engines = {"plain": build_engine(settings, "plain"), "drafts": build_engine(drafting, "drafts")}
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model.source)
    rng = random.Random(3)
    result: dict[str, Any] = {"threads": num_threads, "rounds": num_rounds, "repetitive": {}, "nothing": {}}
    with ExitStack() as stack:
        for built in engines.values():
            built.start()
            stack.callback(built.stop)
        turns = Turns(engines, {name: stack.enter_context(EngineStreams(b.engine)) for name, b in engines.items()})
        for name, text in repetitive_texts().items():
            if only and name not in only:
                continue
            prompt = tokenizer(text)["input_ids"]
            result["repetitive"][name] = turns.compare([prompt], 128, GREEDY, num_rounds)
            print(name, result["repetitive"][name], file=sys.stderr, flush=True)
        for batch in (1, 4, 16):
            if only and f"batch {batch}" not in only:
                continue
            prompts = [[rng.randrange(1_000, 30_000) for _ in range(64)] for _ in range(batch)]
            result["nothing"][f"batch {batch}"] = turns.compare(prompts, 64, _SAMPLED, num_rounds)
            print(batch, result["nothing"][f"batch {batch}"], file=sys.stderr, flush=True)
    return result


def tables(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{m['plain_ms']:.1f}",
            f"{m['drafts_ms']:.1f}",
            f"{m['ratio']:.3f}",
            f"{m['tokens_a_row']:.2f}",
            str(m["same_text"]),
        ]
        for kind in ("repetitive", "nothing")
        for name, m in result[kind].items()
    ]
    return table(["text", "plain ms/token", "with drafts", "ratio", "tokens a row", "same text"], rows)


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.engine.speculation", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="of the texts, by name")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    machine = describe_machine()
    result = run(options.threads, options.rounds, options.only)
    print(machine_line(machine))
    print(tables(result))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "speculation": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
