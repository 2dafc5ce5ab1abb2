"""Rates of shares on a card, for the table by which it is divided: by number of rows, context, and what computes them.

Each variant is an engine of its own, one behind the other in one process, so that they may be compared.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.bare_engine import BareEngine, EngineSize
from benchmarks.gpu.compiled_ptx import counts_in_ptx
from benchmarks.gpu.shape_folder import make_shape_folder
from scheduler.lane_measurement import AbsurdTimes
from scheduler.lane_split import WHOLE_CARD, LaneObjectives, LaneShare

_LEFT_ALONE = (16, 24, 32, 40, 48, 56, 64)  # multiprocessors, of prompts' parts that are tried
_TRIES = 3

Table = dict[str, Any]


def share_table(options: argparse.Namespace) -> Table:
    """Seven shares with products chosen there and with torch's own, beside 8, 16 and 32 rows of 1,024 and 2,112 tokens:
    what `scheduler.lane_split` should offer, and where ways should be chosen."""
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    sizes = [(num_rows, context) for context in (1024, 2112) for num_rows in (8, 16, 32)]
    return {
        name: _measured(options, _left_alone(_LEFT_ALONE), sizes, are_chosen=are_chosen)
        for name, are_chosen in (("chosen", True), ("torchs", False))
    }


def evict_first(options: argparse.Namespace) -> Table:
    """The shipped shares with rows' weights leaving the L2 cache first, and as all else: whether prompts' tiles stay
    there, and what steps of rows take alone. hinted: of the kernels' loads, those that carry it (0: nothing was tried).
    """
    if options.device != "cuda":
        return {"skipped": "needs a card"}
    sizes = [(num_rows, 2112) for num_rows in (1, 8, 16, 32)]
    found: Table = {}
    for name in ("", "evict_first", "again"):  # what drifts shows in the first and the last
        with _evicting("evict_first" if name == "evict_first" else ""):
            found[name or "as_all"] = _measured(options, None, sizes, are_chosen=None)
    return found | {"hinted": _num_hinted()}


def _measured(
    options: argparse.Namespace,
    shares: tuple[LaneShare, ...] | None,
    sizes: Sequence[tuple[int, int]],
    *,
    are_chosen: bool | None,
) -> Table:
    """By rows x context: ms of a step of prompts and of rows alone; then of each share both rates and their sum.
    Medians of three. shares, are_chosen: None: as shipped."""
    with ExitStack() as changes:
        changes.enter_context(_sharing(shares, are_chosen))
        folder = Path(changes.enter_context(tempfile.TemporaryDirectory()))
        size = EngineSize(64, 9000, 2304, 400_000, device=options.device)
        made = make_shape_folder(options.shape, folder)
        engine = BareEngine(str(made), options.dtype, "dummy", size, 1, lanes=LaneObjectives())
        found = {f"{rows}x{context}": _rates(engine.runner, rows, context) for rows, context in sizes}
    found["start_s"] = round(engine.start_s, 1)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _rates(runner: Any, num_rows: int, context: int) -> Any:
    from replicas.cuda.share_times import MeasuredPlans, times_of_shares

    lanes = {share: runner.beside(share) for share in (*runner.shares, WHOLE_CARD)}
    try:
        plans = MeasuredPlans(64, runner.pool.num_blocks, runner.pool.layout.block_size, 9000, num_rows, context)
        tries = [times_of_shares(runner, lanes, plans) for _ in range(_TRIES)]
    except AbsurdTimes as error:
        return str(error)
    alone_ms = [round(1e3 * median(getattr(alone, name) for alone, _ in tries), 2) for name in ("prompts_s", "rows_s")]
    rates = []
    for share in runner.shares:
        of_prompts = median(alone.prompts_s / beside[share].prompts_s for alone, beside in tries)
        of_rows = median(alone.rows_s / beside[share].rows_s for alone, beside in tries)
        rates.append([share.num_processors, *(round(x, 3) for x in (of_prompts, of_rows, of_prompts + of_rows))])
    return {"alone_ms": alone_ms, "shares": rates}


def _left_alone(counts: Sequence[int]) -> tuple[LaneShare, ...]:
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    return tuple(LaneShare(num_processors - count, 0.5, 0.5) for count in counts)


@contextmanager
def _sharing(shares: tuple[LaneShare, ...] | None, are_chosen: bool | None) -> Iterator[None]:
    """Engines made within it have these shares, and ways of products chosen for all of them, or for none."""
    from replicas.cuda import lane_runner
    from replicas.cuda.cublas_lt import CublasLt
    from replicas.cuda.part_products import PartProducts

    def products(of: Sequence[LaneShare]) -> dict[LaneShare, PartProducts]:
        library = CublasLt() if are_chosen else None
        return {share: PartProducts(share.num_processors, library) for share in of}

    with ExitStack() as changes:
        if shares is not None:
            changes.enter_context(patch.object(lane_runner, "estimated_shares", lambda num_processors: shares))
        if are_chosen is not None:
            changes.enter_context(patch.object(lane_runner, "products_of", products))
        yield


@contextmanager
def _evicting(eviction: str) -> Iterator[None]:
    """Graphs that are captured within it read rows' weights so."""
    from replicas.cuda import skinny_linear

    with ExitStack() as changes:
        for name in ("skinny_product", "gemv"):
            kernel = partial(getattr(skinny_linear, name), eviction=eviction)
            changes.enter_context(patch.object(skinny_linear, name, kernel))
        yield


def _num_hinted() -> dict[str, int | str]:
    """Of each kernel of products, by its PTX: a compiler may drop the hint where it copies asynchronously."""
    from replicas.kernels import gemv, skinny_product

    return counts_in_ptx(skinny_product, "L2::evict_first") | counts_in_ptx(gemv, "L2::evict_first")
