"""`python -m benchmarks.simulation_check`: the simulator against the real CPU system, on the same requests.

One server (configs/local.yaml, which records its steps). Probes give the constants of the control path and the
transfer. Then come a load of two minutes at another rate, with requests of its own, and the load that is compared:

- what is judged: the step times fitted from the engines' steps of that load itself, as they were while both shared the
  cores. What clients saw is not used: queueing, batching, handoffs and contention have to come out of the simulation.
- the forecast: the steps of the two minutes before. It differs by as much more as the machine has become quicker or
  slower meanwhile, and a virtual one is not always equally quick.

With --keep FOLDER all that was measured stays there; `--kept FOLDER ...` judges such folders again, without a server,
and says how far the same load was from itself where it was measured more than once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kept_loads import keep_records, kept_records
from benchmarks.real_server import real_server
from cluster.config.root import Config
from cluster.load.arrivals import Arrival
from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.machine import describe_machine, machine_line
from cluster.load.percentile import percentile
from cluster.load.processes import run_load
from cluster.load.report import latencies_s
from cluster.load.request_record import RequestRecord
from cluster.load.tables import table
from cluster.simulation.client import Client, ClientStatus, Job
from cluster.simulation.cost_model import CostModel
from cluster.simulation.simulated_system import SimulatedSystem
from cluster.simulation.step_fit import fit_costs
from cluster.simulation.system_shape import shape_of

_CONFIG = Path(__file__).parents[1] / "configs" / "local.yaml"
_MODEL = "SmolLM2-135M-Instruct"
_KV_BYTES_PER_TOKEN = 46_080  # SmolLM2-135M, float32
_WANTED = 0.15
_PROBES = 8
_LOADS = {"compared": "rows", "compared, forecast": "forecast_rows", "calibration": "calibration_rows"}


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
    parser.add_argument("--keep", type=Path, help="folder for what is measured; made if it is not there")
    parser.add_argument("--kept", type=Path, nargs="+", help="folders that were kept, instead of a server")
    given = parser.parse_args()
    options = CheckOptions(
        given.rate, given.duration_s, given.calibration_rate, given.calibration_s, given.input_len, given.output_len
    )
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    results = [judge(folder) for folder in given.kept] if given.kept else [run_check(options, given.keep)]
    for result in results:
        print(check_table(result))
    if len(results) > 1:
        print(spread_table(results))
    if given.output:
        given.output.write_text(json.dumps({"machine": machine, "simulation_check": results}, indent=1) + "\n")
    return 0 if all(abs(row["ratio"] - 1) <= _WANTED for result in results for row in result["rows"]) else 1


def run_check(options: CheckOptions, keep: Path | None = None) -> dict[str, Any]:
    """Starts a server: 3 GiB, both cores. Blocks for the two loads and two minutes. Raises ServerFailed."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        measure(options, keep)
        return judge(keep)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))
        return judge(Path(folder))


def measure(options: CheckOptions, folder: Path) -> None:
    """The server's steps and what its clients saw, into the folder. As run_check."""
    steps = folder / "steps"
    steps.mkdir()
    config = yaml.safe_load(_CONFIG.read_text())
    config["testing"] = {"step_record_dir": str(steps)}
    with real_server(config, folder) as url:
        _say("server is ready")
        plans = {
            "probes": _probe_plan(url, options),
            "calibration": _plan(url, options, options.calibration_rate_per_s, options.calibration_s, seed=1),
            "compared": _plan(url, options, options.rate_per_s, options.duration_s, seed=2),
        }
        for name, plan in plans.items():
            _say(name)
            keep_records(folder / f"{name}.json", run_load(plan).records)


def judge(folder: Path) -> dict[str, Any]:
    """The loads that were measured, beside their simulation."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    probes, calibration, compared = (
        kept_records(folder / f"{name}.json") for name in ("probes", "calibration", "compared")
    )
    began_s = min(record.sent_s for record in compared)
    _say("steps before the compared load")
    forecast = _with_constants(_fitted(folder, until_s=began_s), probes, config)
    _say("steps of the compared load")
    costs = _fitted(folder, from_s=began_s)
    # Of the probes' own time: they have the machine to themselves, as no request of a load has.
    costs = costs.model_copy(update={"control": forecast.control, "transfer": forecast.transfer})
    _say(
        f"control path: {1000 * costs.control.ingress_s:.1f} ms more than the calls; "
        f"handoff: {1000 * costs.transfer.latency_s:.1f} ms"
    )
    return {
        "folder": str(folder),
        "requests": len(compared),
        "failed": sum(not record.is_ok for record in compared),
        "costs": costs.model_dump(),
        "rows": _rows(compared, _simulate(costs, compared, config)),
        "forecast_rows": _rows(compared, _simulate(forecast, compared, config)),
        "calibration_rows": _rows(calibration, _simulate(forecast, calibration, config)),
    }


def _fitted(folder: Path, **times_s: float) -> CostModel:
    costs, lines = fit_costs(folder / "steps", _KV_BYTES_PER_TOKEN, **times_s)
    for line in lines:
        _say(line)
    return costs


def check_table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [f"{load}: {row['name']}", f"{row['real_ms']:.1f}", f"{row['simulated_ms']:.1f}", f"{row['ratio']:.2f}"]
        for load, key in _LOADS.items()
        for row in result[key]
    ]
    text = table(["", "real ms", "simulated ms", "simulated / real"], rows)
    return f"{result['requests']} requests, {result['failed']} failed\n{text}"


def spread_table(results: Sequence[dict[str, Any]]) -> str:
    """The same load on the real system, measured more than once: what no simulator can be nearer to than by luck."""
    rows = []
    for measured in zip(*(result["rows"] for result in results), strict=True):
        real_ms = [row["real_ms"] for row in measured]
        listed = " / ".join(f"{value:.0f}" for value in real_ms)
        rows.append([measured[0]["name"], listed, f"{max(real_ms) / min(real_ms):.2f}"])
    return table(["the same load", "real ms, each time", "most / least"], rows)


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


def _with_constants(costs: CostModel, probes: Sequence[RequestRecord], config: dict[str, Any]) -> CostModel:
    """What the probes took longer than their simulation says: to the first token, and from there to the second."""
    simulated = _simulate(costs, probes, config)
    good = [(record, client) for record, client in zip(probes, simulated, strict=True) if record.is_ok]
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


def _simulate(costs: CostModel, real: Sequence[RequestRecord], config: dict[str, Any]) -> list[Client]:
    """The requests that were really sent, at the times when they were."""
    first_s = min(record.sent_s for record in real)
    order = sorted(real, key=lambda record: record.sent_s)
    jobs = [
        Job(index, record.sent_s - first_s, record.num_input_tokens, record.num_wanted_tokens, record.num_wanted_tokens)
        for index, record in enumerate(order)
    ]
    shape = shape_of(Config.model_validate(config | {"testing": {}}), costs.kv_bytes_per_token)
    clients = SimulatedSystem(shape, costs).run(jobs).clients
    by_record = {record.index: client for record, client in zip(order, clients, strict=True)}
    return [by_record[record.index] for record in real]


def _rows(real: Sequence[RequestRecord], simulated: list[Client]) -> list[dict[str, Any]]:
    latencies = latencies_s([record for record in real if record.is_ok])
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
