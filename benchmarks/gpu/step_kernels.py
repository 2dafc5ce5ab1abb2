"""python -m benchmarks.gpu.step_kernels PIECE: what kernels a decode step is made of, and what each one adds to it.

Of steps as they ship, replayed as graphs under torch's profiler. A kernel that is launched early waits on the card for
the one in front of it, so how long it was there says little: what it adds is from the last end before its own to its
own. By name and number of programs: the same kernel of other sizes apart. A JSON line of all figures so far after each
step; all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.step_plans import decode_step
from benchmarks.gpu.piece_command import piece_options
from benchmarks.gpu.quantised_pieces import PIECES as QUANTISED
from benchmarks.gpu.step_model import CONTEXT, make_runner_of
from benchmarks.gpu.step_times import GREEDY, decode_ms
from benchmarks.gpu.teller import Figures, tell_on_card

if TYPE_CHECKING:
    from replicas.model.model_runner import ModelRunner

_NUM_STEPS, _REPEATS, _LONGEST_NAME = 20, 40, 48
_LEAST_US = 10.0  # of a step: what adds less in all is told together


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's, of so many programs; microseconds."""

    name: str
    num_programs: int
    start_us: float
    end_us: float


# A piece's name: whose model it is.
PIECES = {
    "kernels-bf16": "steps-bf16",
    "kernels-fp8": "steps-fp8",
    "kernels-fp8-kv": "steps-fp8-kv",
    "kernels-int4": "steps-int4",
    "kernels-70b": "steps-70b",
}


@torch.inference_mode()
def launches_of(runner: ModelRunner, batch: int, folder: Path) -> list[Launch]:
    """Of `_NUM_STEPS` steps behind `decode_ms` of the same rows. folder: for the profiler's file. Blocks."""
    step = decode_step(batch, CONTEXT)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_NUM_STEPS):
            runner.launch(step)
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    return launches_in(json.loads(path.read_text())["traceEvents"])


def launches_in(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Of a trace's events those that are kernels, by start. Raises RuntimeError if there is none."""
    found = []
    for event in events:
        if event.get("cat") == "kernel":
            num_programs = math.prod(event["args"]["grid"])
            found.append(Launch(event["name"], num_programs, event["ts"], event["ts"] + event["dur"]))
    if not found:
        raise RuntimeError("the profiler saw no kernel: CUPTI is missing, or may not look here")
    return sorted(found, key=lambda launch: launch.start_us)


def added_us(launches: Iterable[Launch]) -> dict[tuple[str, int], list[float]]:
    """By name and number of programs, what each launch adds to the time until all before it have ended: from then, or
    from its own start if that is later. Between two steps nothing runs, which nobody adds."""
    added: dict[tuple[str, int], list[float]] = defaultdict(list)
    last_end_us = float("-inf")
    for launch in launches:
        begin_us = max(launch.start_us, last_end_us)
        added[launch.name, launch.num_programs].append(max(0.0, launch.end_us - begin_us))
        last_end_us = max(last_end_us, launch.end_us)
    return added


def figures_of(launches: Iterable[Launch], num_steps: int) -> Figures:
    """By kernel: launches of it in a step, microseconds that one adds, and that all of them do; the most first."""
    by_kernel, others_us, all_us = {}, 0.0, 0.0
    for (name, num_programs), times_us in sorted(added_us(launches).items(), key=lambda of_one: -sum(of_one[1])):
        in_all_us = sum(times_us) / num_steps
        all_us += in_all_us
        if in_all_us < _LEAST_US:
            others_us += in_all_us
        else:
            key = f"{name[:_LONGEST_NAME]} x {num_programs}"
            by_kernel[key] = [len(times_us) / num_steps, round(sum(times_us) / len(times_us), 2), round(in_all_us, 1)]
    return {"added_us": round(all_us, 1), "kernels": by_kernel, "others_us": round(others_us, 1)}


def measure(name: str, options: argparse.Namespace, tell: Callable[[Figures], None]) -> None:
    """name: of a piece, whose model and numbers of rows these are. Blocks for half a minute."""
    piece = QUANTISED[name]
    runner = make_runner_of(piece, options, max(piece.batches))
    runner.capture_steps(piece.batches)
    with tempfile.TemporaryDirectory() as folder:
        for batch in piece.batches:
            step_ms = decode_ms(runner, batch, CONTEXT, GREEDY, _REPEATS)
            launches = launches_of(runner, batch, Path(folder))
            tell({f"{batch} rows": {"step_ms": round(step_ms, 3)} | figures_of(launches, _NUM_STEPS)})


def main() -> None:
    options = piece_options(PIECES, __doc__)
    tell_on_card(options.device, partial(measure, PIECES[options.piece], options))


if __name__ == "__main__":
    main()
