"""`python -m benchmarks.grammars [steps] [host] [first-tokens] [hostile]`: what schemas and grammars cost here.

All four without a name: twenty minutes, on a machine that has nothing else to do. --short tries them. The last
line names what was missed; the status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks.grammars.verdict import Figure, as_table
from cluster.load.machine import describe_machine, machine_line


def _steps(short: bool) -> list[Figure]:
    from benchmarks.grammars.steps import step_figures

    return step_figures(num_rows=16, num_steps=6 if short else 40)


def _first_tokens(short: bool) -> list[Figure]:
    from benchmarks.grammars.first_tokens import first_token_figures

    return first_token_figures(num_rounds=5 if short else 150, num_short_rounds=25 if short else 2000)


def _hostile(short: bool) -> list[Figure]:
    from benchmarks.grammars.hostile import hostile_figures

    return hostile_figures(every=6 if short else 1, quiet_s=4.0 if short else 20.0)


def _host(short: bool) -> list[Figure]:
    from benchmarks.grammars.host_time import host_figures

    return host_figures(num_rows=(16,) if short else (64, 256), num_steps=24 if short else 120)


_PARTS: dict[str, Callable[[bool], list[Figure]]] = {
    "steps": _steps,
    "host": _host,
    "first-tokens": _first_tokens,
    "hostile": _hostile,
}


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.grammars", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - _PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    print(machine_line(describe_machine()))
    missed: list[str] = []
    untold: list[str] = []
    for name in options.parts or _PARTS:
        figures = _PARTS[name](options.short)
        print(f"== {name}\n{as_table(figures)}\n", flush=True)
        missed += [figure.name for figure in figures if figure.is_missed]
        untold += [figure.name for figure in figures if figure.verdict == "not told"]
    print(machine_line(describe_machine()))
    print(f"not told, by the noise here: {', '.join(untold) or 'nothing'}")
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
