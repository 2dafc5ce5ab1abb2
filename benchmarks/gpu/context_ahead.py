"""Steps of rows whose attention reads what is settled before the kernel in front of it has ended, beside steps whose
attention does not: the trial of `replicas.kernels.settled_context`.

An engine for each type of pool. Of each way its graphs are captured anew, over the same layers, weights and blocks, and
all are timed in turns: what drifts shows in each of them.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine.step_plans import decode_step, set_up
from benchmarks.gpu.bare_engine import BareEngine, EngineSize, FewBits
from benchmarks.gpu.compiled_ptx import most_in_ptx
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import GREEDY, decode_ms

# By `paged_decode`'s tiles_ahead. The one that waits stands twice: what two of the same differ by is no gain.
_WAYS: Mapping[str, int | None] = {"waits": None, "reads": 0, "1_tile": 1, "2_tiles": 2, "4_tiles": 4, "again": None}
_STEPS = ((1, 1024), (16, 1024), (64, 1024), (64, 2112))  # rows, context
_TURNS = 3

Figures = dict[str, Any]


def context_ahead(options: argparse.Namespace) -> Figures:
    """By pool and rows x context: ms of a step in each way, median of the turns. differing: logits that are not those
    of the way that waits; fetched: fetches in the kernel's PTX (0: nothing was tried)."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    from replicas.kernels import paged_decode

    found = {kv_dtype: _of_pool(options, kv_dtype) for kv_dtype in ("auto", "fp8")}
    return found | {"fetched": most_in_ptx(paged_decode._attend_piece, "prefetch.L2")}


@contextmanager
def attending(tiles_ahead: int | None) -> Iterator[None]:
    """Steps that are launched, or captured, within it attend so."""
    from replicas.cuda import attention

    kernel = partial(attention.paged_decode, tiles_ahead=tiles_ahead)
    with patch.object(attention, "paged_decode", kernel):
        yield


def _of_pool(options: argparse.Namespace, kv_dtype: str) -> Figures:
    """With weights of fp8: with those of 16 bits attention is a smaller part of a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_shape_folder(options.shape, Path(name))
        size = EngineSize(64, 4096, 2304, 160_000, device=options.device)
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, bits=FewBits("fp8", kv_dtype))
    runner: Any = engine.runner
    graphs = {way: _captured(runner, tiles, sorted({rows for rows, _ in _STEPS})) for way, tiles in _WAYS.items()}
    found: Figures = {"start_s": round(engine.start_s, 1)}
    for rows, context in _STEPS:
        found[f"{rows}x{context}"] = _times(runner, graphs, rows, context)
        found[f"{rows}x{context}_differing"] = _differing(runner, graphs, rows, context)
    del engine, runner, graphs
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _captured(runner: Any, tiles_ahead: int | None, sizes: Sequence[int]) -> Any:
    from replicas.cuda.graphs import StepGraphs

    with torch.inference_mode(), attending(tiles_ahead):
        graphs = StepGraphs(runner._model, runner._slots, runner._sharing, sizes, ())
        graphs.capture()
    return graphs


def _times(runner: Any, graphs: Mapping[str, Any], rows: int, context: int) -> dict[str, float]:
    turns: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(_TURNS):
        for way, captured in graphs.items():
            runner._graphs = captured
            turns[way].append(decode_ms(runner, rows, context, GREEDY, 30))
    return {way: round(median(times_ms), 4) for way, times_ms in turns.items()}


def _differing(runner: Any, graphs: Mapping[str, Any], rows: int, context: int) -> dict[str, int]:
    logits: dict[str, torch.Tensor] = {}
    for way, captured in graphs.items():
        runner._graphs = captured
        runner.launch(set_up(rows, context, runner.pool.layout.block_size)).result()
        logits[way] = runner.logits(decode_step(rows, context)).view(torch.int32)  # by bits: none may be a number
    waited = logits["waits"]
    return {way: int((bits != waited).sum()) for way, bits in logits.items()}
