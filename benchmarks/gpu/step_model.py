"""A model in this process, of which nothing but steps of rows are run: compiled layers, no graphs, no engine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.quantised_pieces import Piece, shape_of
from benchmarks.gpu.shape_folder import make_shape_folder
from replicas.settings import ModelSettings

if TYPE_CHECKING:
    from benchmarks.gpu.steps_runner import StepsRunner

CONTEXT = 1073  # tokens of each row: the mean of those that `offline_workload` has
_AT_ONCE_BYTES = 1 << 30


def make_runner_of(piece: Piece, options: argparse.Namespace, most_rows: int) -> StepsRunner:
    """Of the piece's model; as `make_runner`."""
    with tempfile.TemporaryDirectory() as name:
        shape = shape_of(piece, options.shape, Path(name), is_small=options.small)
        folder = make_shape_folder(shape, Path(name) / "model")
        return make_runner(folder, options.dtype, torch.device(options.device), piece, most_rows)


def make_runner(folder: Path, dtype: str, device: torch.device, piece: Piece, most_rows: int) -> StepsRunner:
    """Layers compiled, no graphs. Its pool has room for the rows, and numbers in it. Blocks."""
    from benchmarks.gpu.steps_runner import StepsRunner
    from replicas.kv.kv_pool import KvPool
    from replicas.model.model_loader import load_model

    most_tokens = CONTEXT + 16
    settings = ModelSettings(str(folder), str(folder), dtype, most_tokens, "dummy", False, piece.quantise)
    loaded = load_model(settings, device, piece.kv_dtype)
    pool = KvPool(loaded.kv_layout(16, piece.kv_dtype), most_rows * -(-most_tokens // 16), device)
    _fill(pool.tensor)
    runner = StepsRunner(loaded, pool, most_rows, most_tokens)
    runner.compile_layers()
    return runner


def _fill(blocks: torch.Tensor) -> None:
    """With normal numbers, the same ones each time: what power a card draws depends on what it reads."""
    torch.manual_seed(1)
    num_at_once = max(1, _AT_ONCE_BYTES // (2 * blocks[0].numel()))
    for some in blocks.split(num_at_once):
        some.copy_(torch.randn(some.shape, dtype=torch.bfloat16, device=some.device))
