"""python -m benchmarks.gpu.few_bits_trials PIECE: steps of weights of few bits with a trial off, on, and off again.

All in one process and on one model: only graphs are captured anew. What drifts shows in the first and the last. A JSON
line of all figures so far after each of them; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.engine.step_plans import set_up
from benchmarks.gpu.piece_command import piece_options
from benchmarks.gpu.quantised_pieces import Teller
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import GREEDY, decode_ms
from replicas.settings import ModelSettings

if TYPE_CHECKING:
    from benchmarks.gpu.steps_runner import StepsRunner
    from replicas.kernels.skinny_product import ProductTile

BATCHES, CONTEXT = (1, 16, 64), 1073
_REPEATS = 40

Figures = dict[str, Any]
Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Trial:
    """quantise: as `model.quantise`, a model each. ways: of what is on, in this order: each is within whose change its
    graphs are captured. The first is off. batches: numbers of rows."""

    quantise: tuple[str, ...]
    ways: Mapping[str, Change]
    batches: tuple[int, ...] = BATCHES


@contextmanager
def as_shipped() -> Iterator[None]:
    yield


@contextmanager
def _int4_parts_as_before() -> Iterator[None]:
    """Of more than 32 rows: one part of very many outputs, eight of very many inputs."""
    from replicas.cuda import int4_card_linear

    tile_of = int4_card_linear.int4_tile

    def before(num_rows: int, num_out: int, num_in: int) -> ProductTile:
        tile = tile_of(num_rows, num_out, num_in)
        if num_rows <= 32 or (num_out < 16384 and num_in < 8192):
            return tile
        return tile._replace(num_parts=1 if num_out >= 16384 else 8)

    with patch.object(int4_card_linear, "int4_tile", before):
        yield


@contextmanager
def _fp8_of_512_inputs() -> Iterator[None]:
    """Of up to 16 rows, where inputs are cut: two parts in steps of 512 inputs instead of four in steps of 256."""
    from replicas.cuda import quantised_card_linear

    tile_of = quantised_card_linear.scaled_tile

    def wide(num_rows: int, num_out: int, num_in: int, most_bytes: int) -> ProductTile:
        tile = tile_of(num_rows, num_out, num_in, most_bytes)
        return tile._replace(block_k=512, num_stages=3, num_parts=2) if num_rows <= 16 and tile.num_parts > 1 else tile

    with patch.object(quantised_card_linear, "scaled_tile", wide):
        yield


@contextmanager
def _first_weights_held(num_fewer_stages: int) -> Iterator[None]:
    from replicas.cuda import int4_card_linear, quantised_card_linear, skinny_linear

    def holding(tile_of: Callable[..., ProductTile]) -> Callable[..., ProductTile]:
        def tile(*size: int) -> ProductTile:
            found = tile_of(*size)
            return found._replace(holds_first=True, num_stages=found.num_stages - num_fewer_stages)

        return tile

    with ExitStack() as stack:
        for module, name in (
            (int4_card_linear, "int4_tile"), (quantised_card_linear, "scaled_tile"), (skinny_linear, "tile_of")
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, holding(getattr(module, name))))
        yield


@contextmanager
def _gemv_tile(wide: tuple[int, int, int] | None, tall: tuple[int, int, int] | None) -> Iterator[None]:
    """Of one row of fp8: of up to 4,096 inputs, and of more; None: as shipped."""
    from replicas.kernels import scaled_gemv

    tile_of = scaled_gemv._tile_of

    def other(num_in: int) -> scaled_gemv.GemvTile:
        tile = wide if num_in <= 4096 else tall
        return tile_of(num_in) if tile is None else scaled_gemv.GemvTile(*tile)

    with patch.object(scaled_gemv, "_tile_of", other):
        yield


@contextmanager
def _gated_tile(*tile: int) -> Iterator[None]:
    from replicas.kernels import scaled_gemv

    with patch.object(scaled_gemv, "_gated_tile", lambda: scaled_gemv.GemvTile(*tile)):
        yield


@contextmanager
def _matrix_units() -> Iterator[None]:
    """One row of fp8 as many."""
    from replicas.cuda import quantised_card_linear

    with patch.object(quantised_card_linear, "is_single", lambda *given: False):
        yield


@contextmanager
def _int4_of_16_rows() -> Iterator[None]:
    from replicas.cuda import int4_card_linear
    from replicas.kernels.int4_product import int4_product

    def padded(x: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, group: int, bias: Any) -> torch.Tensor:
        tile = int4_card_linear.int4_tile(1, words.shape[1], x.shape[1])
        return int4_product(x, words, factors, group, bias, tile, arrived)

    arrived = torch.zeros(4096, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    with patch.object(int4_card_linear, "int4_gemv", padded):
        yield


@contextmanager
def _int4_tile(kind: str, tile: tuple[int, ...]) -> Iterator[None]:
    """kind: of sizes: many inputs, very many outputs, or neither."""
    from replicas.kernels import int4_gemv as module

    tile_of = module._tile_of

    def other(num_out: int, num_in: int) -> module.Int4GemvTile:
        found = "tall" if num_in > 8192 else "wide" if num_out >= 16384 else "few"
        return module.Int4GemvTile(*tile) if found == kind else tile_of(num_out, num_in)

    with patch.object(module, "_tile_of", other):
        yield


PIECES = {
    "fp8-gemv": Trial(
        ("fp8",),
        {
            "off": as_shipped,
            "matrix units": _matrix_units,
        }
        | {
            f"inputs {tile}": partial(_gemv_tile, tile, tile)
            for tile in ((1, 2048, 4), (4, 1024, 4), (2, 1024, 2), (4, 2048, 8), (1, 2048, 2))
        }
        | {
            f"gated {tile}": partial(_gated_tile, *tile)
            for tile in ((8, 1024, 4), (8, 1024, 8), (4, 1024, 4), (8, 256, 2), (8, 512, 8))
        }
        | {"off again": as_shipped},
        (1,),
    ),
    "int4-gemv": Trial(
        ("int4",),
        {"off": as_shipped, "made 16 rows": _int4_of_16_rows}
        | {
            f"few {tile}": partial(_int4_tile, "few", tile)
            for tile in ((8, 2, 8, 8, 4), (8, 2, 16, 16, 2), (8, 2, 4, 4, 4), (8, 2, 8, 8, 1))
        }
        | {
            f"wide {tile}": partial(_int4_tile, "wide", tile)
            for tile in ((8, 4, 4, 4, 1), (8, 2, 8, 8, 2), (8, 8, 4, 4, 1), (8, 4, 16, 16, 1))
        }
        | {
            f"tall {tile}": partial(_int4_tile, "tall", tile)
            for tile in ((8, 2, 16, 16, 3), (8, 2, 8, 8, 3), (8, 2, 8, 8, 2), (8, 4, 16, 16, 1))
        }
        | {"off again": as_shipped},
        (1,),
    ),
    "first-weights": Trial(
        ("fp8", "int4", "none"),
        {
            "off": as_shipped,
            "held": partial(_first_weights_held, 0),
            "held, a stage less": partial(_first_weights_held, 1),
            "off again": as_shipped,
        },
    ),
    "int4-parts": Trial(
        ("int4",), {"off": as_shipped, "parts as before": _int4_parts_as_before, "off again": as_shipped}
    ),
    "fp8-wide": Trial(("fp8",), {"off": as_shipped, "512 inputs": _fp8_of_512_inputs, "off again": as_shipped}),
}


def make_runner(folder: Path, dtype: str, device: torch.device, quantise: str, most_rows: int) -> StepsRunner:
    """Layers compiled, no graphs. Its pool has room for the rows, and numbers in it. Blocks."""
    from benchmarks.gpu.steps_runner import StepsRunner
    from replicas.kv.kv_pool import KvPool
    from replicas.model.model_loader import load_model

    most_tokens = CONTEXT + 16
    loaded = load_model(ModelSettings(str(folder), str(folder), dtype, most_tokens, "dummy", False, quantise), device)
    pool = KvPool(loaded.kv_layout(16), most_rows * -(-most_tokens // 16), device)
    torch.manual_seed(1)
    pool.tensor.normal_()
    runner = StepsRunner(loaded, pool, most_rows, most_tokens)
    runner.compile_layers()
    return runner


@torch.inference_mode()
def steps_of_ways(
    runner: StepsRunner, ways: Mapping[str, Change], batches: Sequence[int], tell: Callable[[Figures], None]
) -> None:
    """tell: is given, by way and number of rows, ms of a step, and how far its logits are from the first way's: apart,
    0 where they are the same bits."""
    first: dict[int, torch.Tensor] = {}
    for way, change in ways.items():
        with change():
            runner.capture_steps(batches)
        for batch in batches:
            step_ms = decode_ms(runner, batch, CONTEXT, GREEDY, _REPEATS)
            logits = runner.logits(set_up(batch, CONTEXT, runner.pool.layout.block_size))
            apart = float((logits - first.setdefault(batch, logits)).abs().max())
            tell({f"{way}, {batch} rows": [round(step_ms, 3), apart]})


def measure(trial: Trial, options: argparse.Namespace, tell: Callable[[Figures], None]) -> None:
    """Blocks for a minute."""
    for quantise in trial.quantise:
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = make_shape_folder(options.shape, Path(name))
            runner = make_runner(folder, options.dtype, torch.device(options.device), quantise, max(BATCHES))
        tell({f"{quantise}, start_s": round(time.perf_counter() - started_s, 1)})
        steps_of_ways(runner, trial.ways, trial.batches, partial(_tell_of, tell, quantise))
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def _tell_of(tell: Callable[[Figures], None], quantise: str, more: Figures) -> None:
    tell({f"{quantise}, {name}": figure for name, figure in more.items()})


def main() -> None:
    options = piece_options(PIECES, __doc__)
    tell = Teller()
    if options.device != "cuda":
        tell({"skipped": "needs a card"})
    else:
        measure(PIECES[options.piece], options, tell)


if __name__ == "__main__":
    main()
