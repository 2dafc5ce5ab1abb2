"""python -m benchmarks.gpu.served --shape FILE.json --tokenizer FOLDER: this server and `vllm serve` on one card.

One after the other, with the same load from the same client (cluster.load): Poisson arrivals, prompts of random
token ids, ignore_eos, streamed. Ours is started from a config file (default: configs/gpu-colocated.yaml) with another
model and load format; vLLM with its defaults, but no prefix cache. --starts 2 starts ours twice: the second time
the compile cache is warm. Prints a table, last; --out gets everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.side_by_side import card_name
from benchmarks.gpu.vllm_servers import SERVED_NAME, VllmPlace, vllm_servers
from benchmarks.real_server import real_server
from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.processes import run_load
from cluster.load.report import summarise, warnings
from cluster.load.tables import table

_ROOT = Path(__file__).parents[2]
_COLUMNS = ("median_ttft", "p90_ttft", "p99_ttft", "median_tpot", "p90_tpot", "p99_tpot", "median_itl", "p99_itl")


def our_config(path: Path, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config["model"] |= {"source": str(folder), "name": SERVED_NAME, "load_format": "dummy"}
    return config


def put_load(url: str, rates: list[float], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run for each rate. Prints as it goes."""
    summaries = []
    for rate in rates:
        plan = LoadPlan(
            target=Target(url, SERVED_NAME),
            rate_per_s=rate,
            num_requests=options.num_requests,
            inputs=LengthRange(options.input_len, options.input_len),
            outputs=LengthRange(options.output_len, options.output_len),
            num_processes=options.processes,
            num_warmup=3,
            timeout_s=120.0,
            body={"temperature": 0.0, "ignore_eos": True},
        )
        summary = summarise(plan, run_load(plan), {})
        print(f"{rate:g} req/s: {summary['completed']} done, {summary['failed']} failed, ", end="")
        print(f"TPOT p90 {summary.get('p90_tpot_ms', float('nan')):.2f} ms {warnings(summary)}", flush=True)
        summaries.append(summary)
    return summaries


def serve_ours(folder: Path, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    config = our_config(options.config, folder)
    ready_s = []
    for number in range(options.starts):
        started_s = time.monotonic()
        place = logs / f"ours-{number}"
        place.mkdir(parents=True, exist_ok=True)
        with real_server(config, place) as url:
            ready_s.append(time.monotonic() - started_s)
            print(f"ours: ready after {ready_s[-1]:.1f} s", flush=True)
            runs = put_load(url, options.rates, options) if number == options.starts - 1 else []
    return {"ready_s": ready_s, "runs": runs}


def serve_vllm(folder: Path, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    max_model_len = yaml.safe_load(options.config.read_text())["model"]["max_model_len"]
    started_s = time.monotonic()
    place = VllmPlace(options.vllm_site, folder, logs, max_model_len)
    with vllm_servers(place, 1, has_prefix_cache=False, hands_over=False) as url:
        ready_s = time.monotonic() - started_s
        print(f"vllm: ready after {ready_s:.1f} s", flush=True)
        return {"ready_s": [ready_s], "runs": put_load(url, options.rates, options)}


def as_table(results: dict[str, Any]) -> str:
    rows = []
    for name in ("vllm", "ours"):
        for run in results.get(name, {}).get("runs", []):
            cells = [f"{run[f'{column}_ms']:.1f}" if f"{column}_ms" in run else "-" for column in _COLUMNS]
            rows.append([f"{name}, {run['request_rate']:g} req/s", f"{run['request_throughput']:.2f}", *cells])
    return table(["", "done req/s", *(f"{column} ms" for column in _COLUMNS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=_ROOT / "configs" / "gpu-colocated.yaml")
    parser.add_argument("--vllm-site", type=Path, help="without it only ours is measured")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0])
    parser.add_argument("--num-requests", type=int, default=160)
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("served.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {"card": card_name()}
    engines = {"ours": serve_ours} | ({"vllm": serve_vllm} if options.vllm_site else {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_shape_folder(options.shape, Path(temporary) / SERVED_NAME, options.tokenizer)
        for name, serve in engines.items():
            try:
                results[name] = serve(folder, options, options.out.parent)
            except Exception as error:
                results[name] = {"error": str(error)}
                print(f"{name}: {error}", flush=True)
            options.out.write_text(json.dumps(results, indent=1))
    print(as_table(results))


if __name__ == "__main__":
    main()
