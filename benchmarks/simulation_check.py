"""`python -m benchmarks.simulation_check`: the simulator against the real CPU system, on the same requests.

One server (configs/local.yaml, which records its steps). First a calibration load at another rate, with requests of
its own: it gives the step times, as they are while both engines share the cores, and the constants of the control path
and the transfer. Then the load that is compared. Only what the calibration gave is simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.load.arrivals import Arrival
from benchmarks.load.client import Target
from benchmarks.load.load_plan import LoadPlan
from benchmarks.load.processes import LoadResult, run_load
from benchmarks.load.report import latencies_s
from benchmarks.load.workload import LengthRange
from benchmarks.machine import describe_machine, machine_line
from benchmarks.real_server import real_server
from benchmarks.tables import table
from cluster.config import Config
from cluster.simulation.client import Client, ClientStatus, Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.percentile import percentile
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.step_fit import fit_costs
from cluster.simulation.system_shape import shape_of

_CONFIG = Path(__file__).parents[1] / "configs" / "local.yaml"
_MODEL = "SmolLM2-135M-Instruct"
_KV_BYTES_PER_TOKEN = 46_080  # SmolLM2-135M, float32
_WANTED = 0.15
_PROBES = 8


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """rate_per_s: of the load that is compared; calibration_rate_per_s: of the one before."""

    rate_per_s: float
    duration_s: float
    calibration_rate_per_s: float
    calibration_s: float
    inputs: LengthRange
    outputs: LengthRange


def main() -> int:
    """0: every ratio is within 15 %."""
    parser = argparse.ArgumentParser("benchmarks.simulation_check", description=__doc__)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second of the load that is compared")
    parser.add_argument("--duration-s", type=float, default=300.0)
    parser.add_argument("--calibration-rate", type=float, default=0.6)
    parser.add_argument("--calibration-s", type=float, default=120.0)
    parser.add_argument("--input-len", type=LengthRange.parse, default="32:256")
    parser.add_argument("--output-len", type=LengthRange.parse, default="16:96")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    options = CheckOptions(
        given.rate, given.duration_s, given.calibration_rate, given.calibration_s, given.input_len, given.output_len
    )
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    result = run_check(options)
    print(check_table(result))
    if given.output:
        given.output.write_text(json.dumps({"machine": machine, "simulation_check": result}, indent=1) + "\n")
    return 0 if all(abs(row["ratio"] - 1) <= _WANTED for row in result["rows"]) else 1


def run_check(options: CheckOptions) -> dict[str, Any]:
    """Starts a server: 3 GiB, both cores. Blocks for the two loads and two minutes. Raises ServerFailed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = folder / "steps"
        steps.mkdir()
        config = yaml.safe_load(_CONFIG.read_text())
        config["testing"] = {"step_record_dir": str(steps)}
        with real_server(config, folder) as url:
            _say("server is ready; calibrating")
            probes = run_load(_probe_plan(url, options))
            calibration = run_load(_plan(url, options, options.calibration_rate_per_s, options.calibration_s, seed=1))
            costs, lines = fit_costs(steps, _KV_BYTES_PER_TOKEN)
            for line in lines:
                _say(line)
            costs = _with_constants(costs, probes, config)
            _say(
                f"control path: {1000 * costs.control.ingress_s:.1f} ms more than the calls; "
                f"handoff: {1000 * costs.transfer.latency_s:.1f} ms"
            )
            _say("the load that is compared")
            real = run_load(_plan(url, options, options.rate_per_s, options.duration_s, seed=2))
    parts = {"calibration": calibration, "compared": real}
    simulated = {name: _simulate(costs, result, config) for name, result in parts.items()}
    rows = _rows(real, simulated["compared"])
    return {
        "options": {"rate_per_s": options.rate_per_s, "duration_s": options.duration_s},
        "requests": len(real.records),
        "failed": sum(not record.is_ok for record in real.records),
        "costs": costs.model_dump(),
        "rows": rows,
        "calibration_rows": _rows(calibration, simulated["calibration"]),
    }


def check_table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [f"{load}: {row['name']}", f"{row['real_ms']:.1f}", f"{row['simulated_ms']:.1f}", f"{row['ratio']:.2f}"]
        for load, key in (("compared", "rows"), ("calibration", "calibration_rows"))
        for row in result[key]
    ]
    text = table(["", "real ms", "simulated ms", "simulated / real"], rows)
    return f"{result['requests']} requests, {result['failed']} failed\n{text}"


def _plan(url: str, options: CheckOptions, rate_per_s: float, duration_s: float, seed: int) -> LoadPlan:
    return LoadPlan(
        target=Target(url, _MODEL, "completions", {}),
        arrival=Arrival.POISSON,
        rate_per_s=rate_per_s,
        num_requests=max(2, round(rate_per_s * duration_s)),
        inputs=options.inputs,
        outputs=options.outputs,
        seed=seed,
        num_warmup=1,
        body={"temperature": 0.0, "ignore_eos": True},
    )


def _probe_plan(url: str, options: CheckOptions) -> LoadPlan:
    """Short requests so far apart that each has the system to itself."""
    plan = _plan(url, options, 0.5, 2.0 * _PROBES, seed=3)
    probe = LengthRange(32, 32)
    return replace(plan, arrival=Arrival.CONSTANT, inputs=probe, outputs=LengthRange(4, 4))


def _with_constants(costs: CostModel, probes: LoadResult, config: dict[str, Any]) -> CostModel:
    """What the probes took longer than their simulation says: to the first token, and from there to the second."""
    simulated = _simulate(costs, probes, config)
    good = [(record, client) for record, client in zip(probes.records, simulated, strict=True) if record.is_ok]
    if not good:
        raise SystemExit("every probe failed; see the server's log")
    to_first_s = statistics.median(record.token_times_s[0] - record.sent_s - client.ttft_s for record, client in good)
    rest_s = statistics.median(
        (record.token_times_s[-1] - record.token_times_s[0]) - (client.last_s - client.first_s)
        for record, client in good
    )
    control = costs.control.model_copy(update={"ingress_s": max(1e-4, costs.control.ingress_s + to_first_s)})
    transfer = costs.transfer.model_copy(update={"latency_s": max(1e-4, costs.transfer.latency_s + rest_s)})
    return costs.model_copy(update={"control": control, "transfer": transfer})


def _simulate(costs: CostModel, real: LoadResult, config: dict[str, Any]) -> list[Client]:
    """The requests that were really sent, at the times when they were."""
    first_s = min(record.sent_s for record in real.records)
    order = sorted(real.records, key=lambda record: record.sent_s)
    jobs = [
        Job(index, record.sent_s - first_s, record.num_input_tokens, record.num_wanted_tokens, record.num_wanted_tokens)
        for index, record in enumerate(order)
    ]
    shape = shape_of(Config.model_validate(config | {"testing": {}}), costs.kv_bytes_per_token)
    clients = SimulatedSystem(shape, costs).run(jobs).clients
    by_record = {record.index: client for record, client in zip(order, clients, strict=True)}
    return [by_record[record.index] for record in real.records]


def _rows(real: LoadResult, simulated: list[Client]) -> list[dict[str, Any]]:
    latencies = latencies_s([record for record in real.records if record.is_ok])
    finished = [client for client in simulated if client.status is ClientStatus.FINISHED]
    ours = {
        "ttft": [client.ttft_s for client in finished],
        "tpot": [value for client in finished if (value := client.tpot_s) is not None],
    }
    rows = []
    for name in ("ttft", "tpot"):
        for percent in (50, 90):
            real_ms, simulated_ms = (1000 * percentile(values[name], percent) for values in (latencies, ours))
            rows.append(
                {
                    "name": f"{name.upper()} p{percent}",
                    "real_ms": real_ms,
                    "simulated_ms": simulated_ms,
                    "ratio": simulated_ms / real_ms,
                }
            )
    return rows


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
