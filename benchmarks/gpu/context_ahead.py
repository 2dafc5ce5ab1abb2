"""Steps of rows whose attention reads what is settled before the kernel in front of it has ended, beside steps whose
attention does not: the trial of `replicas.kernels.settled_context`.

An engine for each type of pool. Of each way its graphs are captured anew, over the same layers, weights and blocks, and
all are timed in turns: what drifts shows in each of them.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine.step_plans import set_up
from benchmarks.gpu.bare_engine import BareEngine, EngineSize, FewBits
from benchmarks.gpu.compiled_ptx import counts_in_ptx
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import device_ms

# By `paged_decode`'s tiles_ahead. The one that waits stands twice: what two of the same differ by is no gain.
_WAYS: Mapping[str, int | None] = {"waits": None, "reads": 0, "1_tile": 1, "2_tiles": 2, "4_tiles": 4, "again": None}
_STEPS = ((1, 1024), (16, 1024), (64, 1024), (64, 2112))  # rows, context
_TURNS, _MOST_ROWS, _LONGEST = 3, 64, 4096

Figures = dict[str, Any]


def context_ahead(options: argparse.Namespace) -> Figures:
    """By pool and rows x context: ms of a pass in each way, to its logits, median of the turns. differing: logits that
    are not those of the way that waits; fetched: fetches in the kernel's PTX (0: nothing was tried)."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    from replicas.kernels import paged_decode

    found: Figures = {kv_dtype: _of_pool(options, kv_dtype) for kv_dtype in ("auto", "fp8")}
    return found | {"fetched": counts_in_ptx(paged_decode, "prefetch.L2")["_attend_piece"]}


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
        size = EngineSize(_MOST_ROWS, _LONGEST, 2304, 160_000, device=options.device)
        engine = BareEngine(str(folder), options.dtype, "dummy", size, 1, bits=FewBits("fp8", kv_dtype))
    passes = CapturedWays(engine, getattr(torch, options.dtype))
    found: Figures = {"start_s": round(engine.start_s, 1)}
    for rows, context in _STEPS:
        found[f"{rows}x{context}"], found[f"{rows}x{context}_differing"] = passes.measured(rows, context)
    del engine, passes
    gc.collect()
    torch.cuda.empty_cache()
    return found


class CapturedWays:
    """Graphs of decode passes in each way, over an engine's model and pool, with slots of their own."""

    @torch.inference_mode()
    def __init__(self, engine: BareEngine, dtype: torch.dtype) -> None:
        """Captures. Blocks."""
        from replicas.cuda.graphs import StepGraphs
        from replicas.cuda.slots import CudaSlots
        from replicas.kernels.work_sharing import WorkSharing

        layout, device = engine.runner.pool.layout, engine.runner.pool.tensor.device
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        sharing = WorkSharing.of(layout.num_kv_heads, layout.head_dim, dtype, num_processors, _MOST_ROWS)
        self._block_size = layout.block_size
        self._slots = CudaSlots(_MOST_ROWS, _LONGEST // layout.block_size, _LONGEST, device)
        self._graphs: dict[str, StepGraphs] = {}
        for way, tiles_ahead in _WAYS.items():
            with attending(tiles_ahead):
                graphs = StepGraphs(engine.model, self._slots, sharing, sorted({rows for rows, _ in _STEPS}), ())
                graphs.capture()
            self._graphs[way] = graphs

    @torch.inference_mode()
    def measured(self, rows: int, context: int) -> tuple[dict[str, float], dict[str, int]]:
        """By way: ms; and how many logits differ. Blocks. Mutates the pool."""
        plan = set_up(rows, context, self._block_size)
        self._slots.apply(plan)
        passes = {}
        for way, graphs in self._graphs.items():
            (passes[way],) = graphs.passes(plan) or ()
        # By their bits: random weights may give what is no number.
        bits = {way: planned.launch().logits.clone().view(torch.int16) for way, planned in passes.items()}
        differing = {way: int((found != bits["waits"]).sum()) for way, found in bits.items()}
        turns: dict[str, list[float]] = {way: [] for way in passes}
        for _ in range(_TURNS):
            for way, planned in passes.items():
                turns[way].append(device_ms(planned.launch, 30))
        return {way: round(median(times_ms), 4) for way, times_ms in turns.items()}, differing
