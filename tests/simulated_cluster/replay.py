"""`python -m` this with a seed: its simulation once more, with the whole story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.simulated_cluster.deliberate_bugs import BUGS, with_bug
from tests.simulated_cluster.seed_run import Run, simulation


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if something is wrong in one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="all seeds up to here, without their stories")
    parser.add_argument("--bug", choices=BUGS, help="with this bug in our code")
    arguments = parser.parse_args(argv)
    begun_s = time.process_time()
    with with_bug(arguments.bug) if arguments.bug else nullcontext(), simulation() as one:
        if arguments.to is None:
            return _show(one.run(arguments.seed, keeps_trace=True))
        runs = []
        for seed in range(arguments.seed, arguments.to):
            run = one.run(seed)
            runs.append(run)
            if run.wrong:
                print(run, flush=True)
    return _sum_up(runs, time.process_time() - begun_s)


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
    print(f"{len(runs)} seeds in {took_s:.1f} s of CPU: {len(wrong)} wrong {wrong[:50]}")
    print("faults:", dict(seen.most_common()))
    print("ends:", dict(ends.most_common()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
