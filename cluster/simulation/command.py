"""`splitserve simulate` and `splitserve fit-steps`: their options, and what they do. No Ray, no model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.config.root import Config
from cluster.simulation.cost_model import load_costs
from cluster.simulation.goodput import parse_goodput
from cluster.simulation.plot import check_can_plot, plot_run
from cluster.simulation.report import as_text, summarise
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.step_fit import fit_costs
from cluster.simulation.system_shape import shape_of
from cluster.simulation.trace_jobs import TraceScale, trace_jobs
from cluster.simulation.traces import read_trace
from cluster.user_error import UserError

# Points of the curves over time.
_NUM_SAMPLES = 240


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve simulate CONFIG`."""
    parser.add_argument("--trace", type=Path, required=True, help="an Azure .csv or Mooncake .jsonl file")
    parser.add_argument(
        "--steps",
        type=Path,
        required=True,
        help="JSON file of step times, such as benchmarks/step_times/llama-3.1-8b-h100.json; "
        "`splitserve fit-steps` makes one from measured steps",
    )
    parser.add_argument(
        "--replicas", type=int, nargs=2, metavar=("P", "D"), help="prefill and decode replicas; colocated: 0 D"
    )
    parser.add_argument(
        "--kv-tokens", type=int, nargs=2, metavar=("P", "D"), help="KV cache of each replica, instead of the config's"
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, help="times as many arrivals, in the same time")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor on prompts and outputs")
    parser.add_argument("--max-requests", type=int, help="only the first so many arrivals")
    parser.add_argument("--duration-s", type=float, help="only the first so many seconds of the trace")
    parser.add_argument(
        "--max-tokens", type=int, help="what every client asks for; its answer still ends where the trace says"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the copies that --rate-scale makes")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2el")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (.png, .svg, .pdf)")
    parser.add_argument("--step-by-step", action="store_true", help="take every decode step singly: slow, same result")


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """The options of `splitserve fit-steps`."""
    parser.add_argument("records", type=Path, help="folder of step records (config key testing.step_record_dir)")
    parser.add_argument("--kv-bytes-per-token", type=int, required=True, help="as the server says when it is ready")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for `splitserve simulate --steps`")


def run_simulate(config: Config, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Raises UserError. say: takes lines for people."""
    if options.plot:
        check_can_plot()
    started_s = time.monotonic()
    costs = load_costs(options.steps)
    shape = shape_of(
        config,
        costs.kv_bytes_per_token,
        tuple(options.replicas) if options.replicas else None,
        tuple(options.kv_tokens) if options.kv_tokens else None,
    )
    scale = TraceScale(
        rate=options.rate_scale,
        length=options.length_scale,
        max_requests=options.max_requests,
        duration_s=options.duration_s,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    try:
        goodput = parse_goodput(options.goodput)
        jobs = trace_jobs(read_trace(options.trace), scale, shape.max_model_len)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if not jobs:
        raise UserError(f"{options.trace}: no request is left to simulate")
    system = SimulatedSystem(shape, costs, may_skip=not options.step_by_step)
    run = system.run(jobs, max(1e-3, (jobs[-1].arrival_s - jobs[0].arrival_s) / _NUM_SAMPLES))
    summary = summarise(system, run, goodput)
    summary |= {"trace": options.trace.name, "seed": options.seed, "step_times": costs.source}
    say(as_text(summary))
    say(f"step times: {costs.source}")
    for line in _write(options, summary):
        say(line)
    if options.plot:
        plot_run(run, options.plot)
        say(f"plotted: {options.plot}")
    say(f"simulated in {time.monotonic() - started_s:.1f} s")
    return 0


def run_fit(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Raises UserError."""
    costs, lines = fit_costs(options.records, options.kv_bytes_per_token)
    for line in lines:
        say(line)
    try:
        options.output.write_text(costs.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--output {options.output}: {error.strerror}") from error
    say(f"written: {options.output}")
    return 0


def _write(options: argparse.Namespace, summary: dict[str, Any]) -> Iterator[str]:
    if options.json:
        try:
            options.json.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {options.json}: {error.strerror}") from error
        yield f"written: {options.json}"
