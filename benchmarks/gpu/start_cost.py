"""python -m benchmarks.gpu.start_cost SHAPE.json [--tokenizer FOLDER] [--device D]: what a start spends on being sure.

Writes a checkpoint of random weights of this shape, then loads it as a replica does and times each part by itself:
identity (digests of weights, tokenizer and config, files unchanged), completeness, the reference of transformers alone,
positions, and both self-checks. Also holds the digest against one taken on the CPU, and against changed weights.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.step_times import table
from replicas.kv.kv_pool import KvPool
from replicas.model import model_loader, untouched_model
from replicas.model.self_check import self_check
from replicas.model.weights_digest import digest_weights
from replicas.serving.device_runner import make_runner
from replicas.settings import ModelSettings

_MAX_MODEL_LEN = 4096
_PARTS = {
    model_loader: ("read_checkpoint", "digest_weights", "tokenizer_digest", "config_digest", "examine"),
    untouched_model: ("compute_reference", "trace_attention", "refuse_neighbours_in_positions"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="start-cost-"))
    try:
        _write_checkpoint(make_shape_folder(arguments.shape, folder, arguments.tokenizer), arguments.device)
        _measure(folder, torch.device(arguments.device))
    finally:
        shutil.rmtree(folder)


def _write_checkpoint(folder: Path, device: str) -> None:
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def _measure(folder: Path, device: torch.device) -> None:
    settings = ModelSettings(str(folder), "", "bfloat16", _MAX_MODEL_LEN, "auto", trust_remote_code=False)
    spent: dict[str, float] = {}
    with _timed(spent, device):
        loaded = model_loader.load_model(settings, device)
    pool = KvPool(loaded.kv_layout(16), 2 * _MAX_MODEL_LEN // 16, device)
    runner = make_runner(loaded, pool, 64, _MAX_MODEL_LEN)
    spent["self-check, kernels made"] = _time(lambda: self_check(runner, loaded), device)
    spent["self-check"] = _time(lambda: self_check(runner, loaded), device)
    spent["warm-up (not of this)"] = _time(runner.warm_up, device)
    spent["self-check, compiled"] = _time(lambda: self_check(runner, loaded), device)
    print(table([{"part": part, "s": round(seconds, 3)} for part, seconds in spent.items()]))
    added = ("digest_weights", "tokenizer_digest", "config_digest", "examine", "self-check", "self-check, compiled")
    print(f"identity and self-checks together: {sum(spent[part] for part in added):.2f} s")
    _compare_digests(folder, loaded.identity.weights)


def _compare_digests(folder: Path, of_card: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    of_cpu = digest_weights(model)
    with torch.no_grad():
        next(iter(model.parameters()))[7, 5] += 1.0
    changed = digest_weights(model)
    print(f"digest on the device {of_card}, on the CPU {of_cpu}, with one number changed {changed}")
    assert of_card == of_cpu != changed


@contextmanager
def _timed(spent: dict[str, float], device: torch.device) -> Iterator[None]:
    """Within, each of the parts adds what it takes to spent."""
    patches = [
        patch.object(module, name, _timing(getattr(module, name), name, spent, device))
        for module, names in _PARTS.items()
        for name in names
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _timing(call: Any, name: str, spent: dict[str, float], device: torch.device) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        result: list[Any] = []
        seconds = _time(lambda: result.append(call(*arguments, **options)), device)
        spent[name] = spent.get(name, 0.0) + seconds
        return result[0]

    return timed


def _time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
