"""What `splitserve bench` and `python -m benchmarks.load` do: put an open-loop load on an OpenAI-compatible server and
report how it fared."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from cluster.client.api_client import ApiClient, key_headers, server_url
from cluster.load.arrivals import Arrival
from cluster.load.client import Target
from cluster.load.command_options import add_load_options, with_bench_defaults
from cluster.load.goodput import parse_goodput
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan, TraceOptions
from cluster.load.machine import describe_machine, machine_line
from cluster.load.processes import ClientFailed, run_load
from cluster.load.report import as_text, summarise
from cluster.user_error import UserError


def main(arguments: list[str] | None = None) -> int:
    """`python -m benchmarks.load`. 0: every request succeeded. 1: some failed, or the run did. 2: wrong arguments."""
    parser = argparse.ArgumentParser("benchmarks.load", description=__doc__)
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, help="requests a second, or inf; a trace's own without it")
    add_load_options(parser)
    options = parser.parse_args(arguments)
    try:
        plan, goodput = _plan(options, {}), parse_goodput(options.goodput)
        plan.schedule()  # in each client it would fail only later
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return _run(options, plan, goodput)


def run_bench(options: argparse.Namespace) -> int:
    """`splitserve bench`. As main, but what is wrong is raised: UserError."""
    with_bench_defaults(options)
    options.url = server_url(options.url)
    key = key_headers(options.api_key_env)
    options.model = options.model or ApiClient(options.url, key).model()
    try:
        plan, goodput = _plan(options, key), parse_goodput(options.goodput)
        times_s, _ = plan.schedule()
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    print(
        f"{len(times_s)} requests to {options.model} at {options.url}, the last one after {times_s[-1]:.0f} s",
        file=sys.stderr,
    )
    return _run(options, plan, goodput)


def _run(options: argparse.Namespace, plan: LoadPlan, goodput: dict[str, float]) -> int:
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


def _plan(options: argparse.Namespace, headers: dict[str, str]) -> LoadPlan:
    """headers: beside those of the options. Raises ValueError."""
    parts = [header.partition(":") for header in options.header]
    headers = headers | {name.strip(): value.strip() for name, _, value in parts}
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
