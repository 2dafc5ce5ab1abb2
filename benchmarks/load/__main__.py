"""`python -m benchmarks.load`: put an open-loop load on an OpenAI-compatible server and report what it does."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.load.arrivals import Arrival
from benchmarks.load.client import Target
from benchmarks.load.load_plan import LoadPlan, TraceOptions
from benchmarks.load.processes import ClientFailed, run_load
from benchmarks.load.report import as_text, summarise
from benchmarks.load.workload import LengthRange
from benchmarks.machine import describe_machine, machine_line
from cluster.simulation.goodput import parse_goodput


def main(arguments: list[str] | None = None) -> int:
    """0: every request succeeded. 1: some failed, or the run did. 2: wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan, goodput = _plan(options), parse_goodput(options.goodput)
        plan.schedule()  # in each client it would fail only later
    except (ValueError, OSError) as error:
        parser.error(str(error))
    machine = describe_machine()
    try:
        result = run_load(plan)
    except ClientFailed as error:
        sys.stderr.write(f"the client failed: {error}\n")
        return 1
    summary = summarise(plan, result, goodput)
    print(machine_line(machine))
    print(as_text(summary))
    if options.output:
        options.output.write_text(json.dumps(summary | {"machine": machine}, indent=1) + "\n")
        print(f"written to {options.output}")
    return 0 if summary["completed"] and not summary["failed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.load", description=__doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--url", required=True, help="such as http://127.0.0.1:8000")
    server.add_argument("--model", required=True)
    server.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    server.add_argument("--header", action="append", default=[], help="'Name: value'; may be repeated")
    server.add_argument("--timeout", type=float, default=600.0, help="of one request, in seconds")
    arrivals = parser.add_argument_group("arrivals")
    arrivals.add_argument("--arrival", type=Arrival, choices=list(Arrival), default=Arrival.POISSON)
    arrivals.add_argument("--rate", type=float, help="requests a second, or inf; a trace's own without it")
    arrivals.add_argument("--burstiness", type=float, default=1.0, help="shape of gamma; below 1 is burstier")
    arrivals.add_argument("--num-requests", type=int, help="default: 100, or all of a trace")
    work = parser.add_argument_group("work")
    work.add_argument("--input-len", type=LengthRange.parse, default="128", help="tokens: 128, or 64:256 for a range")
    work.add_argument("--output-len", type=LengthRange.parse, default="64", help="tokens, likewise")
    work.add_argument("--trace", type=Path, help="lengths from an Azure .csv or Mooncake .jsonl file")
    work.add_argument("--length-scale", type=float, default=1.0, help="factor on a trace's lengths")
    work.add_argument("--max-input-len", type=int, help="cuts a trace's prompts")
    work.add_argument("--max-output-len", type=int, help="cuts a trace's outputs")
    work.add_argument("--prompt", choices=["ids", "text"], help="default: ids for completions, text for chat")
    work.add_argument("--token-ids", default="1000:30000", help="range of random prompt ids")
    work.add_argument("--no-ignore-eos", action="store_true", help="for servers that do not know ignore_eos")
    work.add_argument("--no-stream", action="store_true", help="only E2E is measured then")
    work.add_argument("--temperature", type=float, default=0.0)
    work.add_argument("--body", type=json.loads, default={}, help="further JSON fields of each request")
    work.add_argument("--seed", type=int, default=0)
    run = parser.add_argument_group("run")
    run.add_argument("--processes", type=int, default=1, help="client processes")
    run.add_argument("--warmup", type=int, default=1, help="requests sent first, one by one, and not counted")
    run.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2el")
    run.add_argument("--output", type=Path, help="JSON file")
    return parser


def _plan(options: argparse.Namespace) -> LoadPlan:
    parts = [header.partition(":") for header in options.header]
    headers = {name.strip(): value.strip() for name, _, value in parts}
    ids = LengthRange.parse(options.token_ids)
    rate = options.rate
    if rate is None and options.arrival is not Arrival.TRACE:
        raise ValueError("--rate is needed (inf sends everything at once)")
    body: dict[str, Any] = {"temperature": options.temperature}
    if not options.no_ignore_eos:
        body["ignore_eos"] = True
    trace = options.trace
    num_requests = options.num_requests or (None if trace else 100)
    return LoadPlan(
        target=Target(options.url, options.model, options.endpoint, headers),
        arrival=options.arrival,
        rate_per_s=math.inf if rate is not None and math.isinf(rate) else rate,
        burstiness=options.burstiness,
        num_requests=num_requests,
        inputs=options.input_len,
        outputs=options.output_len,
        trace=TraceOptions(trace, options.length_scale, options.max_input_len, options.max_output_len)
        if trace
        else None,
        prompt=options.prompt or ("text" if options.endpoint == "chat" else "ids"),
        token_ids=(ids.low, ids.high),
        stream=not options.no_stream,
        seed=options.seed,
        num_processes=options.processes,
        num_warmup=options.warmup,
        timeout_s=options.timeout,
        body=body | options.body,
    )


if __name__ == "__main__":
    sys.exit(main())
