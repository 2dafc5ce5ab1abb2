"""What the thread of an engine does for a step of held rows while a card would compute it, in seconds of its CPU time.

The device's part is played by a runner whose tokens are there at once: any that the masks allow. So what is told is all
that stands between the tokens of one step and the launch of the next but one, without what launches take.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.bench_settings import bundled_model_folder
from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from benchmarks.gpu.mask_load import WAYS
from benchmarks.gpu.mask_steps import GRAMMAR
from benchmarks.grammars.verdict import Figure
from replicas.engine.constrained_rows import Grammars
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_fuel import GrammarFuel
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.mask_maker import MaskMaker
from replicas.model.model_runner import ForwardHandle, ModelRunner, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sampled_tokens import SampledTokens
from scheduler.plan import StepPlan
from tests.engines.tiny_model import save_tiny_model

_VOCAB_SIZE, _ENDS = 49_152, (0, 2)
_PROMPT_TOKENS = 16


def host_figures(num_rows: tuple[int, ...], num_steps: int) -> list[Figure]:
    """Blocks: some seconds for each. Masks are made on the engine's own thread, so that their time is in it."""
    tokenizer = grammar_tokenizer(bundled_model_folder(), _VOCAB_SIZE, _ENDS)
    cache = GrammarCache(tokenizer, GrammarFuel(), num_threads=1, max_entries=1, max_bytes=1 << 20)
    maker = MaskMaker(tokenizer, 1, lambda rows, words: np.empty((rows, words), dtype=np.int32))
    figures = []
    for count in num_rows:
        parts = _parts_ms(Grammars(cache, maker, _VOCAB_SIZE), count, num_steps)
        figures += [Figure(f"{count} held rows, {name}", ms, "ms", None, "CPU time") for name, ms in parts.items()]
    cache.close()
    return figures


def _parts_ms(grammars: Grammars, num_rows: int, num_steps: int) -> dict[str, float]:
    """Medians by part of a step."""
    size = EngineSize(num_rows, 512, 2048, capacity_tokens=512 * num_rows, device="cpu")
    with tempfile.TemporaryDirectory() as name:
        save_tiny_model(Path(name))
        bare = BareEngine(name, "float32", "auto", size, lag=1)
    bare.grammars = grammars
    _play(bare.runner)
    held = bare.beside(None)
    taken_s: defaultdict[str, list[float]] = defaultdict(list)
    engine = held.engine
    for owner, method, part in (
        (engine.core, "turn", "plan"),
        (engine, "_take_output", "commit"),
        (engine.calls, "masks", "masks, texts"),
        (engine, "_flush", "frames"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), taken_s[part]))
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 500) for _ in range(_PROMPT_TOKENS)] for _ in range(num_rows)]
    with held:
        held.run(prompts, [num_steps] * num_rows, WAYS["greedy"], GRAMMAR)
    # The first and last steps are of prompts, and of none.
    return {part: 1e3 * statistics.median(times[len(times) // 4 : -4]) for part, times in taken_s.items()}


def _timed(method: Callable[..., Any], taken_s: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        started_s = time.thread_time()
        try:
            return method(*args, **named)
        finally:
            taken_s.append(time.thread_time() - started_s)

    return timed


def _play(runner: ModelRunner) -> None:
    """The runner computes nothing from now on."""
    rng = random.Random(5)

    def forward(plan: StepPlan) -> ForwardHandle:
        return ForwardHandle(plan, torch.zeros(1, 1) if plan.slices else None)

    def choose(forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        if forwarded.logits is None:
            return StepHandle(forwarded.plan)
        tokens = [5] * sum(len(part.sampled_choices) for part in forwarded.plan.slices)
        for row, words in zip(masks.rows, masks.words, strict=True) if masks is not None else ():
            tokens[row] = rng.choice(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        return StepHandle(forwarded.plan, SampledTokens(torch.tensor(tokens)))

    runner.forward, runner.choose = forward, choose  # type: ignore[method-assign]
