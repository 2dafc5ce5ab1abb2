"""`python -m benchmarks.scheduler`: the scheduler benchmark alone."""

from __future__ import annotations

import argparse
import sys

from benchmarks.scheduler.decision_costs import run_scheduler_benchmark, scheduler_tables
from cluster.load.machine import describe_machine, machine_line


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.scheduler", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    print(machine_line(describe_machine()))
    print(scheduler_tables(run_scheduler_benchmark(options.short)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
