"""`python -m` this with a seed: its simulation once more, with the whole story; or many seeds, on several cores."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

from tests.simulated_cluster.deliberate_bugs import BUGS, with_bug
from tests.simulated_cluster.seed_run import Run, simulation

_AT_A_TIME = 100  # seeds of a process


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if something is wrong in one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="all seeds up to here, without their stories")
    parser.add_argument("--processes", type=int, default=1, help="over which those are spread")
    parser.add_argument("--bug", choices=BUGS, help="with this bug in our code")
    arguments = parser.parse_args(argv)
    if arguments.to is None:
        (run,) = _run(range(arguments.seed, arguments.seed + 1), bug=arguments.bug, keeps_trace=True)
        return _show(run)
    begun_s, runs = time.monotonic(), []
    for run in _run_all(range(arguments.seed, arguments.to), arguments.processes, arguments.bug):
        runs.append(run)
        if run.wrong:
            print(run, flush=True)
    return _sum_up(runs, time.monotonic() - begun_s)


def _run_all(seeds: range, num_processes: int, bug: str | None) -> Iterator[Run]:
    """In their order."""
    parts = [seeds[first : first + _AT_A_TIME] for first in range(0, len(seeds), _AT_A_TIME)]
    run = partial(_run, bug=bug)
    if num_processes == 1:
        for part in parts:
            yield from run(part)
        return
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        for done in pool.map(run, parts):
            yield from done


def _run(seeds: range, bug: str | None, keeps_trace: bool = False) -> list[Run]:
    with with_bug(bug) if bug else nullcontext(), simulation() as one:
        return [one.run(seed, keeps_trace) for seed in seeds]


def _show(run: Run) -> int:
    print(*run.trace, sep="\n")
    print(run, dict(run.seen), dict(run.ends), sep="\n")
    return int(bool(run.wrong))


def _sum_up(runs: list[Run], took_s: float) -> int:
    seen, ends = Counter[str](), Counter[str]()
    for run in runs:
        seen += run.seen
        ends += run.ends
    wrong = [run.seed for run in runs if run.wrong]
    print(f"{len(runs)} seeds in {took_s:.1f} s: {len(wrong)} wrong {wrong[:50]}")
    print("faults:", dict(seen.most_common()))
    print("ends:", dict(ends.most_common()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
