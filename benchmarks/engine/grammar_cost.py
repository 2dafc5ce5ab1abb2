"""What grammars cost on a CPU: steps of rows that have one beside steps of rows that have none, masks, and compiling.

    python -m benchmarks.engine.grammar_cost --rows 16 --steps 24

In seconds of CPU of this process, so that a busy machine changes little. Steps of both kinds take turns, and both draw
from the same logits: only the two phases and the masks between them differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer

from benchmarks.engine.bench_settings import bundled_model_folder, engine_settings
from cluster.load.machine import describe_machine, machine_line
from replicas.grammars import grammar_text
from replicas.grammars.compiled_grammar import compile_grammar
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.mask_maker import MaskMaker
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.grammar import Grammar
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

_SCHEMAS = Path(__file__).parents[2] / "tests" / "golden" / "schemas.json"
_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16
_ENDS = (0, 2)


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.engine.grammar_cost", description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24, help="of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine_line(describe_machine()))
    tokenizer = grammar_tokenizer(bundled_model_folder(), 49_152, _ENDS)
    schemas: list[object] = json.loads(_SCHEMAS.read_text())
    _print_row("compiling 200 schemas", "p50", "p90", "p99", "max")
    _print_row(*_compile_times(tokenizer, schemas))
    _print_row("a step, ms of CPU", "free rows", "held rows", "+ %", "masks alone")
    for row in _steps(tokenizer, options):
        _print_row(*row)
    return 0


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def _compile_times(tokenizer: LLTokenizer, schemas: list[object]) -> tuple[str, ...]:
    texts = [grammar_text.json_schema(schema) for schema in schemas]  # type: ignore[arg-type]
    times_ms = []
    for text in texts:
        started_s = time.process_time()
        compile_grammar(tokenizer, text, GrammarFuel())
        times_ms.append(1e3 * (time.process_time() - started_s))
    cuts = np.percentile(times_ms, (50, 90, 99, 100))
    return ("ms of CPU, first masks included", *(f"{cut:.1f}" for cut in cuts))


def _steps(tokenizer: LLTokenizer, options: argparse.Namespace) -> list[tuple[str, ...]]:
    ways = {
        "greedy": SamplingParams(0.0),
        "sampled": SamplingParams(1.0, seed=3),
        "top-p": SamplingParams(1.0, top_p=0.9),
    }
    settings = engine_settings(1, 512, 16_384)
    loaded = load_model(settings.model, torch.device("cpu"))
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(_BLOCK_SIZE), 1024, torch.device("cpu")), 32, 1024)
    return [_one_way(runner, tokenizer, name, way, options.rows, options.steps) for name, way in ways.items()]


def _one_way(
    runner: ModelRunner, tokenizer: LLTokenizer, name: str, way: SamplingParams, num_rows: int, num_steps: int
) -> tuple[str, ...]:
    _begin(runner, way, num_rows)
    # Objects of every kind of value, so that a text is never complete.
    member = {
        "type": "object",
        "properties": {"n": {"type": "string"}, "v": {"type": "number"}},
        "required": ["n", "v"],
    }
    grammar = Grammar(grammar_text.json_schema({"type": "array", "items": member, "minItems": 200}))
    compiled = compile_grammar(tokenizer, grammar.text, GrammarFuel())
    texts = [FollowedText(grammar, compiled) for _ in range(num_rows)]
    maker = MaskMaker(tokenizer, 1, lambda rows, words: np.empty((rows, words), dtype=np.int32))
    free_s, held_s, mask_s = [], [], []
    for step in range(num_steps):
        plan = StepPlan(
            step + 1, (), (), (), tuple(Slice(f"r{row}", 0, row, _PROMPT_TOKENS + step) for row in range(num_rows))
        )
        started_s = time.process_time()
        runner.launch(plan).result()
        free_s.append(time.process_time() - started_s)
        started_s = time.process_time()
        forwarded = runner.forward(plan)
        masks_s = time.process_time()
        held, words = maker.masks(texts)
        mask_s.append(time.process_time() - masks_s)
        output = runner.choose(forwarded, TokenMasks(tuple(held), words)).result()
        for text, token in zip(texts, output.tokens, strict=True):
            text.take(token.token_id)
        held_s.append(time.process_time() - started_s)
    assert not any(text.failure for text in texts)
    free, held_ms, masks = (1e3 * statistics.median(seconds) for seconds in (free_s, held_s, mask_s))
    more = 100 * (held_ms / free - 1)
    return (f"{num_rows} rows, {name}", f"{free:.1f}", f"{held_ms:.1f}", f"{more:+.1f}", f"{masks:.2f}")


def _begin(runner: ModelRunner, way: SamplingParams, num_rows: int) -> None:
    blocks = 16
    for row in range(num_rows):
        prompt = tuple((7 * row + 13 * index) % 40_000 + 20 for index in range(_PROMPT_TOKENS))
        chunk = Slice.of_prompt(f"r{row}", row, 0, prompt, (SampleTarget(row, 0),))
        write = TableWrite(row, 0, tuple(range(row * blocks, (row + 1) * blocks)))
        runner.launch(StepPlan(0, (SlotInit(row, 0, way, None),), (write,), (), (chunk,))).result()


if __name__ == "__main__":
    sys.exit(main())
