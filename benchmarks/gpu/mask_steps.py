"""Decode steps of the whole engine with rows that a schema holds, beside rows that nothing does; and masks alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu.bare_engine import BareEngine, TimedTokens, steady_step_ms
from benchmarks.gpu.mask_load import KINDS, SCHEMA, WAYS
from replicas.grammars import grammar_text
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.mask_maker import MaskMaker
from scheduler.grammar import Grammar

GRAMMAR = Grammar(grammar_text.json_schema(SCHEMA))


class MaskSteps:
    """Of an engine that runs and has grammars."""

    def __init__(self, engine: BareEngine, num_in: int, top_id: int) -> None:
        """num_in: tokens of a prompt, which are random ones below top_id."""
        assert engine.grammars is not None
        self._engine, self._grammars = engine, engine.grammars
        self._num_in, self._top_id = num_in, top_id
        self._rng = random.Random(5)

    def step_ms(self, num_rows: int, num_out: int, way: str, num_repeats: int) -> dict[str, float]:
        """By kind, the best of so many runs, in turns. Blocks. Raises RuntimeError if a text is not as it should be."""
        best: dict[str, float] = {}
        for _ in range(num_repeats):
            for kind in KINDS:
                streams = self._run(num_rows, num_out, way, kind)
                self._check(streams, kind, num_out)
                best[kind] = min(best.get(kind, float("inf")), steady_step_ms(streams))
        return {kind: round(ms, 3) for kind, ms in best.items()}

    def mask_ms(self, num_rows: int, num_out: int, num_threads: int) -> float:
        """Median ms of taking a token of each row and making its next mask, on such threads, nothing else running."""
        streams = self._run(num_rows, num_out, "greedy", "held")
        maker = MaskMaker(self._grammars.cache.tokenizer, num_threads, _words)
        texts = [self._text() for _ in streams]
        times_ms = []
        for number in range(num_out):
            for text, stream in zip(texts, streams, strict=True):
                text.take(stream.tokens[number])
            started_s = time.perf_counter()
            maker.masks(texts)
            times_ms.append(1e3 * (time.perf_counter() - started_s))
        return round(float(np.median(times_ms)), 3)

    def _run(self, num_rows: int, num_out: int, way: str, kind: str) -> list[TimedTokens]:
        prompts = [[self._rng.randrange(100, self._top_id) for _ in range(self._num_in)] for _ in range(num_rows)]
        grammar = GRAMMAR if kind == "held" else None
        return self._engine.run(prompts, [num_out] * num_rows, WAYS[way], grammar)

    def _check(self, streams: Sequence[TimedTokens], kind: str, num_out: int) -> None:
        if short := [len(stream.tokens) for stream in streams if len(stream.tokens) != num_out]:
            raise RuntimeError(f"texts of {short} tokens instead of {num_out}")
        texts = [self._text(stream.tokens) for stream in streams]
        for text in texts:
            text.catch_up()
        num_within = sum(text.failure is None for text in texts)
        if num_within != (len(texts) if kind == "held" else 0):
            raise RuntimeError(f"{num_within} of {len(texts)} {kind} texts are within the schema")

    def _text(self, token_ids: Sequence[int] = ()) -> FollowedText:
        return FollowedText(GRAMMAR, self._grammars.cache.get(GRAMMAR.text).result(timeout=60), token_ids)


def _words(num_rows: int, num_words: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.empty((num_rows, num_words), dtype=np.int32)
