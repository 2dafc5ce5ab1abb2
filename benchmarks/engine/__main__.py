"""`python -m benchmarks.engine`: the engine benchmark alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.engine.run import engine_tables, run_engine_benchmark
from cluster.load.machine import describe_machine, machine_line


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.engine", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both engines")
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    machine = describe_machine()
    result = run_engine_benchmark(options.threads, options.short)
    print(machine_line(machine))
    print(engine_tables(result))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "engine": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
