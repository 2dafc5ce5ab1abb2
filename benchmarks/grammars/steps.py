"""Steps of rows that grammars hold beside steps of rows that nothing does, on a CPU; and compiling.

In seconds of CPU of this process, so that a busy machine changes little. Steps of both kinds take turns, and both draw
from the same logits: only the two phases and the masks between them differ.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLTokenizer

from benchmarks.engine.bench_settings import bundled_model_folder, engine_settings
from benchmarks.grammars.verdict import Figure
from cluster.load.percentile import percentile
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
_MOST_MORE = 5.0  # percent
_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16
_ENDS = (0, 2)


def step_figures(num_rows: int, num_steps: int) -> list[Figure]:
    """num_steps: of each kind. Blocks: a minute for 40 steps of 16 rows."""
    torch.set_num_threads(1)
    tokenizer = grammar_tokenizer(bundled_model_folder(), 49_152, _ENDS)
    return [*_steps(tokenizer, num_rows, num_steps), *_compile_times(tokenizer, json.loads(_SCHEMAS.read_text()))]


def _compile_times(tokenizer: LLTokenizer, schemas: list[Any]) -> list[Figure]:
    times_ms = []
    for text in map(grammar_text.json_schema, schemas):
        started_s = time.process_time()
        compile_grammar(tokenizer, text, GrammarFuel())
        times_ms.append(1e3 * (time.process_time() - started_s))
    told = f"CPU time, {len(schemas)} schemas, first masks included; longest {max(times_ms):.1f}"
    return [Figure(f"compiling, p{share}", percentile(times_ms, share), "ms", None, told) for share in (50, 99)]


def _steps(tokenizer: LLTokenizer, num_rows: int, num_steps: int) -> list[Figure]:
    ways = {
        "greedy": SamplingParams(0.0),
        "sampled": SamplingParams(1.0, seed=3),
        "top-p": SamplingParams(1.0, top_p=0.9),
    }
    settings = engine_settings(1, 512, 16_384)
    loaded = load_model(settings.model, torch.device("cpu"))
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(_BLOCK_SIZE), 1024, torch.device("cpu")), 32, 1024)
    return [_one_way(runner, tokenizer, name, way, num_rows, num_steps) for name, way in ways.items()]


def _one_way(
    runner: ModelRunner, tokenizer: LLTokenizer, name: str, way: SamplingParams, num_rows: int, num_steps: int
) -> Figure:
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
    free_ms, held_ms, mask_ms = (1e3 * statistics.median(seconds) for seconds in (free_s, held_s, mask_s))
    told = f"ms of CPU a step: {free_ms:.1f} free, {held_ms:.1f} held, masks alone {mask_ms:.2f}"
    return Figure(f"{num_rows} held rows, {name}", 100 * (held_ms / free_ms - 1), "% more", _MOST_MORE, told)


def _begin(runner: ModelRunner, way: SamplingParams, num_rows: int) -> None:
    blocks = 16
    for row in range(num_rows):
        prompt = tuple((7 * row + 13 * index) % 40_000 + 20 for index in range(_PROMPT_TOKENS))
        chunk = Slice.of_prompt(f"r{row}", row, 0, prompt, (SampleTarget(row, 0),))
        write = TableWrite(row, 0, tuple(range(row * blocks, (row + 1) * blocks)))
        runner.launch(StepPlan(0, (SlotInit(row, 0, way, None),), (write,), (), (chunk,))).result()
