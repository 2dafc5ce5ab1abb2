"""`make chaos`: faults in a real server of 2 prefill and 2 decode replicas, one after another, under golden streams.

Prints what it does, and at the end a table: for each fault what failed, was wrong, hung or leaked, and for how long.
Ends with 1 when a promise of docs/reliability.md was not kept.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from cluster.load.machine import describe_machine, machine_line
from tests.chaos.asked import some_asked
from tests.chaos.golden_load import learn_undisturbed
from tests.chaos.judge import Judge
from tests.chaos.outcome_table import outcome_table
from tests.chaos.row_run import Outcome, run_row
from tests.chaos.rows import ROWS, Row
from tests.chaos.served import chaos_server


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make chaos", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rows with one of these in their names")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    parser.add_argument("--clients", type=int, default=32, help="streams that are open all the time, 32 at most")
    parser.add_argument("--proxy", default="serve", choices=("serve", "haproxy"), help="who takes connections")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS.values() if not options.words or any(word in row.name for word in options.words)]
    if options.list or not rows:
        print("\n".join(ROWS))
        return 0 if options.list else 2
    outcomes = _run(rows, options.clients, options.proxy)
    print(f"\n{machine_line(describe_machine())}\n\n{outcome_table(outcomes)}\n")
    broken = [f"{outcome.row.name}: {what}" for outcome in outcomes for what in outcome.broken]
    missing = [row.name for row in rows if row not in [outcome.row for outcome in outcomes]]
    print("\n".join([*broken, *(f"{name}: could not be run" for name in missing)]) or "all promises were kept")
    return 1 if broken or missing else 0


def _run(rows: list[Row], num_clients: int, proxy: str) -> list[Outcome]:
    began_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {what}", flush=True)

    outcomes: list[Outcome] = []
    all_asked = some_asked(num_clients)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        say("starting 2 ingress, 2 prefill and 2 decode replicas")
        with chaos_server(Path(folder), proxy) as server:
            say(f"{server.url} is ready; asking {len(all_asked)} requests without any fault")
            judge = Judge(learn_undisturbed(server.url, all_asked))
            for number, row in enumerate(rows, start=1):
                say(f"[{number}/{len(rows)}] {row.name}")
                try:
                    outcomes.append(run_row(server, row, all_asked, judge, say))
                except AssertionError as error:
                    # The server is in a state that no later row may be judged by.
                    say(f"stopped: {error}")
                    print(server.log()[-5000:])
                    break
                say("; ".join(outcomes[-1].broken) or "as promised")
    return outcomes


if __name__ == "__main__":
    # So that the server ends with it, as at an interrupt: what a shell starts in the background hears of none.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
