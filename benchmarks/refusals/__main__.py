"""`python -m benchmarks.refusals`: this benchmark alone."""

from __future__ import annotations

import argparse
import sys

from benchmarks.refusals.run import refusals_tables, run_refusals_benchmark
from cluster.load.machine import describe_machine, machine_line


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.refusals", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    print(machine_line(describe_machine()))
    print(refusals_tables(run_refusals_benchmark(options.short)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
