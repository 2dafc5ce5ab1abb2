"""`splitserve simulate` and `splitserve fit-steps`: what they do. No Ray, no model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from cluster.config.root import Config
from cluster.load.goodput import parse_goodput
from cluster.load.traces import read_trace
from cluster.simulation.cost_model import load_costs
from cluster.simulation.plot import check_can_plot, plot_run
from cluster.simulation.report import as_text, summarise
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.step_fit import fit_costs
from cluster.simulation.system_shape import shape_of
from cluster.simulation.trace_jobs import TraceScale, trace_jobs
from cluster.terminal.steps import Steps
from cluster.user_error import UserError

# Points of the curves over time.
_NUM_SAMPLES = 240


def run_simulate(config: Config, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Raises UserError. say: takes lines for people."""
    if options.plot:
        check_can_plot()
    started_s = time.monotonic()
    measured = load_costs(options.steps)
    costs = measured.with_kv_dtype("fp8") if config.kv_dtype == "fp8" else measured
    if config.model.quantise != "none":
        costs = costs.with_weights(config.model.quantise)
    shape = shape_of(
        config,
        costs.kv_bytes_per_token,
        tuple(options.replicas) if options.replicas else None,
        tuple(options.kv_tokens) if options.kv_tokens else None,
        costs.lanes,
    )
    scale = TraceScale(
        rate=options.rate_scale,
        length=options.length_scale,
        max_requests=options.max_requests,
        duration_s=options.duration_s,
        max_tokens=options.max_tokens,
        seed=options.seed,
        acceptance=tuple(options.acceptance),
    )
    try:
        goodput = parse_goodput(options.goodput)
        jobs = trace_jobs(read_trace(options.trace), scale, shape.max_model_len)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if any(options.acceptance) and shape.decode.drafts is None:
        raise UserError("--acceptance: nothing is guessed with this speculative.method; set another in the config")
    if not jobs:
        raise UserError(f"{options.trace}: no request is left to simulate")
    system = SimulatedSystem(shape, costs, may_skip=not options.step_by_step)
    interval_s = max(1e-3, (jobs[-1].arrival_s - jobs[0].arrival_s) / _NUM_SAMPLES)
    with Steps() as steps, steps.step(f"simulating {options.trace.name}", len(jobs), "requests") as step:
        run = system.run(jobs, interval_s, step.reached)
    summary = summarise(system, run, goodput)
    summary |= {"trace": options.trace.name, "seed": options.seed, "step_times": costs.source}
    say(as_text(summary))
    say(f"step times: {costs.source}")
    if costs.kv_dtype != measured.kv_dtype:
        say(
            f"KV cache in {costs.kv_dtype}: {costs.kv_bytes_per_token} bytes a token; steps as with {measured.kv_dtype}"
        )
    if costs.decode.base_s != measured.decode.base_s:
        saved_ms = 1e3 * (measured.decode.base_s - costs.decode.base_s)
        say(f"weights in {config.model.quantise}: {saved_ms:.2f} ms less a step by their bytes; products as measured")
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
    costs = costs.model_copy(update={"kv_dtype": options.kv_dtype})
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
