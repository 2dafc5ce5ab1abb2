"""`make bench`: the benchmarks that need no GPU. Prints tables and writes one JSON file for each benchmark.

History is kept by hand in benchmarks/RESULTS.md. A load on a running server: `python -m benchmarks.load`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.load.machine import describe_machine, machine_line

_RESULTS = Path(__file__).parent / "results"


def _control_path(short: bool) -> tuple[dict[str, Any], str]:
    from benchmarks.control_path.run import PROXIES, control_path_tables, run_control_path_benchmark

    result = run_control_path_benchmark(PROXIES, short)
    return result, control_path_tables(result)


def _engine(short: bool) -> tuple[dict[str, Any], str]:
    from benchmarks.engine.run import engine_tables, run_engine_benchmark

    result = run_engine_benchmark(num_threads=1, short=short)
    return result, engine_tables(result)


def _refusals(short: bool) -> tuple[dict[str, Any], str]:
    from benchmarks.refusals.run import refusals_tables, run_refusals_benchmark

    result = run_refusals_benchmark(short)
    return result, refusals_tables(result)


def _scheduler(short: bool) -> tuple[dict[str, Any], str]:
    from benchmarks.scheduler.decision_costs import run_scheduler_benchmark, scheduler_tables

    result = run_scheduler_benchmark(short)
    return result, scheduler_tables(result)


_BENCHMARKS: dict[str, Callable[[bool], tuple[dict[str, Any], str]]] = {
    "control_path": _control_path,
    "engine": _engine,
    "refusals": _refusals,
    "scheduler": _scheduler,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(_BENCHMARKS)}; all without one")
    parser.add_argument("--full", action="store_true", help="more repeats: five minutes and more instead of three")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder for the JSON files")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - _BENCHMARKS.keys()
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    options.results.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for name in options.names or _BENCHMARKS:
        machine = describe_machine()
        print(f"== {name}\n{machine_line(machine)}", flush=True)
        result, text = _BENCHMARKS[name](not options.full)
        print(f"{text}\n")
        path = options.results / f"{machine['date'][:10]}-{name}.json"
        print(f"{'replaced' if path.exists() else 'written'}: {path}\n")
        path.write_text(json.dumps({"machine": machine, name: _rounded(result)}, indent=1) + "\n")
        has_failed |= any("error" in part for part in result.values() if isinstance(part, dict))
    return 1 if has_failed else 0


def _rounded(value: Any) -> Any:
    """Four digits are more than any of it is worth."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
