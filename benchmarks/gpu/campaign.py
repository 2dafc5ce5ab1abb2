"""python -m benchmarks.gpu.campaign --shapes FOLDER --tokenizer FOLDER --state FILE.jsonl [--only PIECE,...]: one card.

All rows by which the handoff, two lanes and the colocated engine are judged, and vLLM beside them, in pieces. Each
piece is done once: what is in the state file is not measured again, so a call that ends early goes on in the next.
--budget-s: nothing is begun that would take longer. --out FOLDER gets the state and the servers' logs. A table, last.
--small --device cpu: everything but vLLM and kernels, with a tiny model and few requests, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign_record import CampaignRecord, Line
from benchmarks.gpu.campaign_servers import Place, ServedPiece, Workload, serve_piece
from benchmarks.gpu.campaign_table import as_text
from benchmarks.gpu.goodput_search import Limits
from benchmarks.gpu.mask_load import Burst
from benchmarks.gpu.shape_folder import make_shape_folder

_ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("vllm_figures.json")
_SHAPE = "llama-3.1-8b"
_LOG_BYTES = 400_000  # of each, its end

WORKLOADS = (
    Workload("2048/128", 2048, 128, Limits(400.0, 10.0), 300, 9.0),
    # Fewer: 300 at one a second are five minutes, on either engine.
    Workload("8192/256", 8192, 256, Limits(1000.0, 10.0), 120, 1.3),
    Workload("512/512", 512, 512, Limits(400.0, 10.0), 300, 13.0),
)
# Of a server on a bare machine: start, in seconds.
_TWO_LANES_S, _ONE_LANE_S, _SPLIT_S, _VLLM_S = 75.0, 60.0, 75.0, 120.0
_HALVES = {
    f"pools.{pool}.{key}": value
    for pool in ("prefill", "decode")
    for key, value in (("num_gpus", 0.5), ("kv_memory_fraction", 0.35))
}
SERVED = (
    ServedPiece(
        "lanes",
        "gpu-one-card.yaml",
        _TWO_LANES_S,
        (("2048/128", 8.0), ("2048/128", 12.0)),
        ("2048/128", "512/512", "8192/256"),
    ),
    # Long prompts in one step each, by hand instead of by graphs: no row waits for it in two lanes.
    ServedPiece(
        "lanes-long",
        "gpu-one-card.yaml",
        _TWO_LANES_S,
        (),
        ("8192/256",),
        changes={"pools.decode.max_batch_tokens": 8448},
    ),
    ServedPiece(
        "colocated",
        "gpu-colocated.yaml",
        _ONE_LANE_S,
        (("2048/128", 4.0), ("2048/128", 8.0), ("2048/128", 12.0)),
        has_records=True,
        masks_as="colocated-masks",
    ),
    # Two prompts in one step, as vLLM has them near saturation.
    ServedPiece(
        "colocated-4352",
        "gpu-colocated.yaml",
        _ONE_LANE_S,
        (("2048/128", 12.0),),
        changes={"pools.decode.max_batch_tokens": 4352},
    ),
    ServedPiece("split", "gpu-1p1d.yaml", _SPLIT_S, (("2048/128", 4.0),), changes=_HALVES),
    ServedPiece("split-slow", "gpu-1p1d.yaml", _SPLIT_S, (("2048/128", 4.0),), changes=_HALVES, reads_bytes_per_s=5e8),
    # At 7.1 too: its kept runs had another client's arrivals; seed 0 of 300 requests comes at 0.91 of the rate asked.
    ServedPiece(
        "vllm", None, _VLLM_S, (("2048/128", 8.0), ("2048/128", 7.1)), ("8192/256", "512/512"), masks_as="vllm-masks"
    ),
    # What masks cost, by themselves: what another piece has measured of them is not measured again.
    ServedPiece("vllm-masks", None, _VLLM_S, (), masks_as="vllm-masks"),
    ServedPiece("colocated-masks", "gpu-colocated.yaml", _ONE_LANE_S, (), masks_as="colocated-masks"),
    ServedPiece("lanes-masks", "gpu-one-card.yaml", _TWO_LANES_S, (), masks_as="lanes-masks"),
)
# Without a server: about how many seconds each takes.
ALONE = {
    "handoff": 25.0,
    "steps-two": 100.0,
    "steps-one": 75.0,
    "shares": 70.0,
    "share-table": 170.0,
    "evict-first": 160.0,
    "logits": 110.0,
    "chunks": 60.0,
    "attention-rows": 25.0,
    "attention-long": 30.0,
    "prompt-beside-rows": 60.0,
    "masks": 90.0,
    "speculative-plain": 75.0,
    "speculative": 85.0,
    "speculative-always": 85.0,
    "speculative-oracle": 80.0,
    "vllm-ngram": 240.0,
}
NAMES = (*ALONE, *(piece.name for piece in SERVED))


class Budget:
    """Seconds of this call."""

    def __init__(self, total_s: float) -> None:
        self._end_s = time.monotonic() + total_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def is_time_for(self, seconds: float) -> bool:
        return seconds <= self.left_s


def measure_alone(name: str, options: argparse.Namespace, logs: Path, record: CampaignRecord, budget: Budget) -> bool:
    """Whether it is done now. In a process of its own: it leaves no memory on the card."""
    if record.of(name) is not None:
        return True
    if not budget.is_time_for(ALONE[name]):
        return False
    command = [sys.executable, "-m", "benchmarks.gpu.card_pieces", name, "--shape", str(_shape(options))]
    command += ["--tokenizer", str(options.tokenizer)]
    command += ["--device", options.device, *(["--small", "--dtype", "float32"] if options.small else [])]
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    if options.vllm_site is not None and name in ("attention-long", "vllm-ngram"):
        paths.insert(0, str(options.vllm_site))
    started_s = time.monotonic()
    path = logs / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            timeout=max(10.0, budget.left_s),
            cwd=_ROOT,
        )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {path.read_text()[-1500:]}")
    line = {"piece": name, "workload": None, "took_s": round(time.monotonic() - started_s, 1)}
    record.add(line | json.loads(done.stdout.strip().splitlines()[-1]))
    print(json.dumps(record.lines[-1]), flush=True)
    return True


def run_piece(name: str, options: argparse.Namespace, place: Place, record: CampaignRecord, budget: Budget) -> bool:
    """Whether it is done. What goes wrong in one piece costs that piece only."""
    try:
        if name in ALONE:
            return measure_alone(name, options, place.logs, record, budget)
        (piece,) = [piece for piece in _served(options) if piece.name == name]
        return serve_piece(piece, place, record)
    except Exception as error:
        traceback.print_exc()
        record.add({"piece": name, "workload": None, "error": f"{type(error).__name__}: {error}"[:1500]})
        return False


def _shape(options: argparse.Namespace) -> Path:
    path: Path = options.shapes / f"{_SHAPE}.json"
    return path


def _served(options: argparse.Namespace) -> Sequence[ServedPiece]:
    if not options.small:
        return SERVED
    return [replace(piece, start_s=60.0) for piece in SERVED]


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
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="state files of earlier machines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--most-runs", type=int, default=4, help="of a search, those of earlier calls included")
    parser.add_argument("--processes", type=int, default=4, help="of the client")
    parser.add_argument("--proxy", choices=["haproxy", "serve"], default="haproxy")
    parser.add_argument("--vllm-site", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(NAMES):
        parser.error(f"no such piece: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """0 when all that was asked for is done."""
    options = _options()
    budget = Budget(options.budget_s)
    options.out.mkdir(parents=True, exist_ok=True)
    record = CampaignRecord([options.state, options.out / "campaign.jsonl"], options.resume)
    kept: dict[str, Any] = json.loads(KEPT.read_text())
    known: list[Line] = [] if options.small else kept["runs"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_shape_folder(_shape(options), Path(temporary) / "shape", options.tokenizer)
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
