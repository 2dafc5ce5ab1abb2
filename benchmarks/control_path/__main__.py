"""`python -m benchmarks.control_path`: the control-path benchmark alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.control_path.run import PROXIES, control_path_tables, run_control_path_benchmark
from cluster.load.machine import describe_machine, machine_line


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.control_path", description=__doc__)
    parser.add_argument("--proxy", nargs="+", choices=PROXIES, default=PROXIES, help="who takes connections")
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    machine = describe_machine()
    result = run_control_path_benchmark(options.proxy, options.short)
    print(machine_line(machine))
    print(control_path_tables(result))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "control_path": result}, indent=1) + "\n")
    return 1 if any("error" in measured for measured in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
