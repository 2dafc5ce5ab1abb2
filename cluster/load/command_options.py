"""The options of `splitserve bench` and `python -m benchmarks.load`. Loads nothing of the load generator but these."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cluster.client.api_client import DEFAULT_URL, KEY_VARIABLE
from cluster.load.arrivals import Arrival
from cluster.load.length_range import LengthRange

# Half a minute: for who looks at a server for the first time.
_RATE_PER_S, _NUM_REQUESTS = 1.0, 30


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve bench`: what is not given is asked of the server, or small."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument(
        "--rate", type=float, help=f"requests a second, or inf; default: {_RATE_PER_S:g}, with --arrival trace its own"
    )
    parser.add_argument(
        "--api-key-env",
        default=KEY_VARIABLE,
        metavar="NAME",
        help=f"environment variable that holds the API key, if the server wants one; default: {KEY_VARIABLE}",
    )
    add_load_options(parser, _NUM_REQUESTS)


def with_bench_defaults(options: argparse.Namespace) -> argparse.Namespace:
    """Mutates: what a small run takes for granted, where it was not given and no trace says it."""
    if options.rate is None and options.arrival is not Arrival.TRACE:
        options.rate = _RATE_PER_S
    if options.num_requests is None and options.trace is None:
        options.num_requests = _NUM_REQUESTS
    return options


def add_load_options(parser: argparse.ArgumentParser, num_requests: int = 100) -> None:
    """What both commands have. num_requests: what the help says of --num-requests."""
    server = parser.add_argument_group("server")
    server.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    server.add_argument("--header", action="append", default=[], help="'Name: value'; may be repeated")
    server.add_argument("--timeout", type=float, default=600.0, help="of one request, in seconds")
    arrivals = parser.add_argument_group("arrivals")
    arrivals.add_argument("--arrival", type=Arrival, choices=list(Arrival), default=Arrival.POISSON)
    arrivals.add_argument("--burstiness", type=float, default=1.0, help="shape of gamma; below 1 is burstier")
    arrivals.add_argument("--num-requests", type=int, help=f"default: {num_requests}, or all of a trace")
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
