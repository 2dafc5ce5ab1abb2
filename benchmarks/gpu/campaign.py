"""python -m benchmarks.gpu.campaign --tokenizer FOLDER --state FILE.jsonl --out FOLDER [--only PIECE,...]: one card.

All rows by which the handoff, two lanes and the colocated engine are judged, and vLLM beside them, in pieces. Each
piece is done once: what is in the state file is not measured again, so a call that ends early goes on in the next.
--workloads: of runs and searches those only. --budget-s: nothing is begun that would take longer. --out gets the state
and the servers' logs. A table, last.
--small --device cpu: everything but vLLM and kernels, with a tiny model and few requests, to try the script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.cache_load import CacheLoad
from benchmarks.gpu.campaign_alone import ALONE, Budget, measure_alone, shape_of
from benchmarks.gpu.campaign_pieces import SERVED, WORKLOADS
from benchmarks.gpu.campaign_record import CampaignRecord, Line, held_alone
from benchmarks.gpu.campaign_servers import Place, ServedPiece, Workload, serve_piece
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.goodput_search import Limits
from benchmarks.gpu.mask_load import Burst
from benchmarks.gpu.saturated_load import SaturatedLoad
from benchmarks.gpu.shape_folder import make_shape_folder

_ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("vllm_figures.json")
_SHAPES = Path(__file__).with_name("shapes")
_LOG_BYTES = 400_000  # of each, its end

NAMES = (*ALONE, *(piece.name for piece in SERVED))
_LOADS = tuple(workload.name for workload in WORKLOADS)


def run_piece(name: str, options: argparse.Namespace, place: Place, record: CampaignRecord, budget: Budget) -> bool:
    """Whether it is done. What goes wrong in one piece costs that piece only."""
    try:
        if name in ALONE:
            return measure_alone(name, options, place.logs, record, budget)
        (piece,) = [piece for piece in asked_of(options) if piece.name == name]
        return serve_piece(piece, place, record)
    except Exception as error:
        traceback.print_exc()
        record.add({"piece": name, "workload": None, "error": f"{type(error).__name__}: {error}"[:1500]})
        return False


def asked_of(options: argparse.Namespace) -> Sequence[ServedPiece]:
    """Of each piece the workloads that are asked for."""
    pieces = [
        replace(
            piece,
            runs=tuple(run for run in piece.runs if run[0] in options.workloads),
            searches=tuple(name for name in piece.searches if name in options.workloads),
        )
        for piece in SERVED
    ]
    return [replace(piece, start_s=60.0) for piece in pieces] if options.small else pieces


def _workloads(options: argparse.Namespace) -> dict[str, Workload]:
    if options.small:
        small = [replace(w, num_in=24, num_out=6, count=6, limits=Limits(2000.0, 400.0)) for w in WORKLOADS]
        return {workload.name: replace(workload, first_rate=4.0) for workload in small}
    return {workload.name: workload for workload in WORKLOADS}


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Of the configs: how the server is reached; on a CPU also what it computes on, and how little."""
    changes: dict[str, Any] = {"server.proxy": options.proxy}
    if options.device == "cuda":
        return changes
    changes |= {"model.max_model_len": 512, "model.dtype": "float32"}
    for pool in ("prefill", "decode"):
        changes |= {f"pools.{pool}.device": "cpu", f"pools.{pool}.num_gpus": 0.0, f"pools.{pool}.num_threads": 1}
        changes |= {f"pools.{pool}.kv_memory_fraction": None, f"pools.{pool}.kv_capacity_tokens": 4096}
        changes |= {f"pools.{pool}.max_running_sequences": 16, f"pools.{pool}.max_batch_tokens": 256}
        changes |= {f"pools.{pool}.lag": 0}
    return changes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, default=_SHAPES, help="a folder of config.json files, by model")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="state files of earlier machines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--workloads", default=",".join(_LOADS), help=f"of {', '.join(_LOADS)}")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--most-runs", type=int, default=4, help="of a search, those of earlier calls included")
    parser.add_argument("--processes", type=int, default=4, help="of the client")
    parser.add_argument("--proxy", choices=["haproxy", "serve"], default="haproxy")
    parser.add_argument("--vllm-site", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.only, options.workloads = options.only.split(","), options.workloads.split(",")
    if unknown := set(options.only) - set(NAMES):
        parser.error(f"no such piece: {', '.join(sorted(unknown))}")
    if unknown := set(options.workloads) - set(_LOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """0 when all that was asked for is done."""
    options = _options()
    budget = Budget(options.budget_s)
    options.out.mkdir(parents=True, exist_ok=True)
    with held_alone(options.state), held_alone(options.out):
        return _run(options, budget)


def _run(options: argparse.Namespace, budget: Budget) -> int:
    record = CampaignRecord([options.state, options.out / "campaign.jsonl"], options.resume)
    kept: dict[str, Any] = json.loads(KEPT.read_text())
    known: list[Line] = [] if options.small else kept["runs"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_shape_folder(shape_of(options), Path(temporary) / "shape", options.tokenizer)
        place = Place(
            folder,
            Path(temporary) / "logs",
            _ROOT / "configs",
            _workloads(options),
            options.vllm_site,
            options.processes,
            options.most_runs,
            tuple(known),
            _overrides(options),
            budget.is_time_for,
            Burst(4, 24, 12, 1) if options.small else Burst(num_processes=options.processes),
            CacheLoad(96, 2, 3, 3, 40, 20, 8, 1) if options.small else CacheLoad(),
            SaturatedLoad(3, 24, 60, 2, 48) if options.small else SaturatedLoad(),
        )
        done = {}
        for name in options.only:
            done[name] = run_piece(name, options, place, record, budget)
            keep_logs(place.logs, options.out)
    print(as_text(record, _workloads(options), kept), flush=True)
    left = [name for name, is_done in done.items() if not is_done]
    print(f"{budget.left_s:.0f} s are left; not done: {', '.join(left) or 'nothing'}", flush=True)
    return 1 if left else 0


def keep_logs(logs: Path, out: Path) -> None:
    """The end of each into one file: few files come back from a card."""
    with (out / "logs.txt").open("ab") as kept:
        for log in sorted(logs.rglob("*.log")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LOG_BYTES))
                kept.write(f"\n==== {log.relative_to(logs)}\n".encode() + file.read())
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
