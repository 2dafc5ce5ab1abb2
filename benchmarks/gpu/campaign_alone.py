"""Pieces of a campaign without a server, each in a process of its own: how long it may take, what it has told."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign_record import CUT, CampaignRecord, Line
from benchmarks.gpu.few_bits_trials import PIECES as TRIALS
from benchmarks.gpu.quantised_pieces import PIECES as QUANTISED
from benchmarks.gpu.quantised_pieces import PRODUCTS
from benchmarks.gpu.side_by_side import VLLM_ENVIRONMENT
from benchmarks.gpu.speculative_pieces import PIECES as SPECULATIVE
from benchmarks.gpu.step_kernels import PIECES as KERNELS
from benchmarks.gpu.vllm_servers import own_vllm_cache

_ROOT = Path(__file__).parents[2]
_SHAPE = "llama-3.1-8b"
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
    "cache-steps": 90.0,
    "quant-kernels": 65.0,
    "steps-bf16": 75.0,
    "steps-fp8": 75.0,
    "steps-fp8-kv": 75.0,
    "steps-int4": 75.0,
    "steps-int8": 60.0,
    "steps-70b": 120.0,
    "vllm-fp8": 120.0,
    "vllm-fp8-kv": 125.0,
    "vllm-awq": 120.0,
    "fp8-wide": 40.0,
    "kernels-bf16": 55.0,
    "kernels-fp8": 40.0,
    "kernels-fp8-kv": 40.0,
    "kernels-int4": 40.0,
    "kernels-70b": 60.0,
    "speculative-plain": 190.0,
    "speculative": 225.0,
    "speculative-oracle": 175.0,
    "speculative-oracle-fp8": 175.0,
    "speculative-eagle3": 110.0,
    "vllm-plain": 270.0,
    "vllm-ngram": 295.0,
}
_MODULES = {
    "quantised_pieces": (*QUANTISED, PRODUCTS),
    "speculative_pieces": SPECULATIVE,
    "few_bits_trials": TRIALS,
    "step_kernels": KERNELS,
}
_MOST_OF_EXPECTED = 2.5  # times as long as expected: it hangs


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """returncode: None: it took too long. figures: the last that it told."""

    returncode: int | None
    figures: dict[str, Any]


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
    started_s = time.monotonic()
    path = logs / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = run_child(name, options, path, min(max(10.0, budget.left_s), _MOST_OF_EXPECTED * ALONE[name]))
    line: Line = {"piece": name, "workload": None, "took_s": round(time.monotonic() - started_s, 1)}
    if done.returncode != 0:
        if done.figures:
            record.add(line | {"workload": CUT} | done.figures)
        how = "took too long" if done.returncode is None else f"ended with {done.returncode}"
        raise RuntimeError(f"{name} {how}: {path.read_text(errors='replace')[-1500:]}")
    record.add(line | done.figures)
    print(json.dumps(record.lines[-1]), flush=True)
    return True


def run_child(name: str, options: argparse.Namespace, log: Path, timeout_s: float) -> ChildEnd:
    """A piece's process. Blocks. Whatever it has started ends with it."""
    module = next((module for module, names in _MODULES.items() if name in names), "card_pieces")
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", name, "--shape", str(shape_of(options))]
    command += ["--tokenizer", str(options.tokenizer)]
    command += ["--device", options.device, *(["--small", "--dtype", "float32"] if options.small else [])]
    out = log.with_suffix(".out")  # no pipe: a process that it leaves behind would hold that open
    with log.open("w") as errors, out.open("w") as said:
        child = subprocess.Popen(
            command, stdout=said, stderr=errors, env=_environment(name, options), cwd=_ROOT, start_new_session=True
        )
        try:
            returncode: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _end_group(child)  # an engine's own processes too, which may hold the card's memory
            child.wait()
    lines = [line for line in out.read_text().splitlines() if line.startswith("{")]
    return ChildEnd(returncode, json.loads(lines[-1]) if lines else {})


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """Raises ValueError where vLLM is to be measured and nothing says where it is."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    if name in ("vllm-plain", "vllm-ngram") or (name in QUANTISED and QUANTISED[name].said is not None):
        if options.vllm_site is None:
            raise ValueError("vLLM is measured where --vllm-site says that it is")
        return own_vllm_cache(os.environ | VLLM_ENVIRONMENT | {"PYTHONPATH": f"{options.vllm_site}:{_ROOT}"})
    if options.vllm_site is not None and name == "attention-long":
        paths.insert(0, str(options.vllm_site))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def shape_of(options: argparse.Namespace) -> Path:
    path: Path = options.shapes / f"{_SHAPE}.json"
    return path
