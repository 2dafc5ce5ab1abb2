"""python -m benchmarks.gpu.few_bits_trials PIECE: steps of weights of few bits with a trial off, on, and off again.

All in one process and on one model: only graphs are captured anew. What drifts shows in the first and the last. A JSON
line of all figures so far after each of them; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from benchmarks.engine.step_plans import set_up
from benchmarks.gpu.piece_command import piece_options
from benchmarks.gpu.quantised_pieces import PIECES as QUANTISED
from benchmarks.gpu.step_model import CONTEXT, make_runner_of
from benchmarks.gpu.step_times import GREEDY, decode_ms
from benchmarks.gpu.teller import Figures, tell_on_card

if TYPE_CHECKING:
    from benchmarks.gpu.steps_runner import StepsRunner
    from replicas.kernels.skinny_product import ProductTile

_BATCHES, _REPEATS = (1, 16, 64), 40

Change = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Trial:
    """of: a piece's name, whose model it is. ways: of what is on, in this order: each is within whose change its graphs
    are captured. The first is off."""

    of: str
    ways: Mapping[str, Change]


@contextmanager
def as_shipped() -> Iterator[None]:
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


PIECES = {
    "fp8-wide": Trial("steps-fp8", {"off": as_shipped, "512 inputs": _fp8_of_512_inputs, "off again": as_shipped}),
}


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
    started_s = time.perf_counter()
    runner = make_runner_of(QUANTISED[trial.of], options, max(_BATCHES))
    tell({"start_s": round(time.perf_counter() - started_s, 1)})
    steps_of_ways(runner, trial.ways, _BATCHES, tell)


def main() -> None:
    options = piece_options(PIECES, __doc__)
    tell_on_card(options.device, partial(measure, PIECES[options.piece], options))


if __name__ == "__main__":
    main()
