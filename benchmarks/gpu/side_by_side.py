"""python -m benchmarks.gpu.side_by_side --shapes FOLDER --vllm-site FOLDER: this engine and vLLM on one card.

For each shape (a NAME.json of --shapes; random weights, bf16) vLLM and then this engine, each in a process of its own,
do the same work, timed the same way (benchmarks.gpu.offline_workload): start, decode steps, prefill, offline rate.
--vllm-site: where vLLM is installed; it comes first on its process's path, and nowhere else. Without it only this
engine is measured. Prints one table, last; --out gets everything as JSON after each half, so that a run cut short
leaves what it has. The children's output goes to a .log beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.shape_folder import make_shape_folder
from cluster.load.tables import table

_ROOT = Path(__file__).parents[2]
_SHAPES = ("llama-3.1-8b", "qwen3-0.6b")
_ENGINES = ("vllm", "ours")
# flashinfer's sampler needs a package that vLLM does without; greedy choice is the same.
VLLM_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

Results = dict[str, Any]


def card_name() -> str:
    """As the driver says it: no CUDA is set up in this process, whose children need the whole card."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no card"


def run_engine(engine: str, folder: Path, options: argparse.Namespace, log: Path) -> Results:
    """One child's figures, or {"error": ...}. Blocks until it ends, at most options.timeout_s."""
    out = folder / f"{engine}.json"
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    if engine == "vllm":
        environment |= VLLM_ENVIRONMENT | {"PYTHONPATH": f"{options.vllm_site}:{_ROOT}"}
    command = [sys.executable, "-m", "benchmarks.gpu.offline_child", engine, str(folder), "--out", str(out)]
    command += ["--started-at", str(time.time()), "--step-tokens", str(options.step_tokens)]
    command += ["--device", options.device, "--dtype", options.dtype]
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=_ROOT, timeout=options.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.timeout_s:.0f} s"}
    if code:
        return {"error": f"exit code {code}: {log.read_text(errors='replace')[-1500:]}"}
    result: Results = json.loads(out.read_text())
    return result


def as_table(shape: str, results: dict[str, Results]) -> str:
    """Rows of figures, columns of engines; the last column: ours to vLLM's, above 1 where ours is better."""
    names = [name for result in results.values() for name in result.get("figures", {})]
    rows = []
    for name in dict.fromkeys(names):
        values = [results.get(engine, {}).get("figures", {}).get(name) for engine in _ENGINES]
        rows.append([name, *(f"{v:,.2f}" if v is not None else "-" for v in values), _gain(name, *values)])
    errors = [f"{engine}: {result['error']}" for engine, result in results.items() if "error" in result]
    return "\n".join([table([shape, *_ENGINES, "ours is better by"], rows), *errors])


def _gain(name: str, theirs: float | None, ours: float | None) -> str:
    if not theirs or not ours:
        return "-"
    ratio = ours / theirs if name.endswith("tok/s") else theirs / ours
    return f"{ratio:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--vllm-site", type=Path)
    parser.add_argument("--only", nargs="+", default=_SHAPES, help="names of shapes")
    parser.add_argument("--out", type=Path, default=Path("side_by_side.json"))
    parser.add_argument("--step-tokens", type=int, default=16_384, help="most tokens of a step of this engine")
    parser.add_argument("--timeout-s", type=float, default=280.0, help="of each engine and shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    engines = _ENGINES if options.vllm_site else _ENGINES[1:]
    results: Results = {"card": card_name(), "shapes": {}}
    print(results["card"], flush=True)
    for shape in options.only:
        halves: dict[str, Results] = {}
        results["shapes"][shape] = halves
        for engine in engines:
            with tempfile.TemporaryDirectory() as temporary:
                folder = make_shape_folder(options.shapes / f"{shape}.json", Path(temporary))
                started_s = time.monotonic()
                halves[engine] = run_engine(engine, folder, options, options.out.with_suffix(f".{shape}.{engine}.log"))
            print(f"{shape}, {engine}: {time.monotonic() - started_s:.0f} s", flush=True)
            options.out.write_text(json.dumps(results, indent=1))
        print(as_table(shape, halves), flush=True)


if __name__ == "__main__":
    main()
