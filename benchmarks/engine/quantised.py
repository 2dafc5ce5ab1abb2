"""`python -m benchmarks.engine.quantised`: what `model.quantise` costs in quality and saves in time, on the CPU.

Perplexity of the bundled model over tests/golden/perplexity.txt, by transformers' code over our layers, and decode
steps of the engine's runner, each kind against float32. Kinds are loaded one after the other, and timed in turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer

from benchmarks.engine.bench_settings import bundled_model_folder, engine_settings
from benchmarks.engine.step_plans import decode_step, set_up
from benchmarks.engine.step_times import timed_ms
from cluster.load.machine import describe_machine, machine_line
from cluster.load.tables import table
from replicas.kv.kv_pool import KvPool
from replicas.model.checkpoint import read_checkpoint
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.quantised_model import read_quantised
from replicas.quantisation.scheme import WeightKind
from replicas.quantisation.scheme_reading import scheme_made_here

TEXT = Path(__file__).parents[2] / "tests/golden/perplexity.txt"
KINDS = ("none", "int8", "fp8", "int4")
_CPU = torch.device("cpu")
_CONTEXT = 256


def model_of(kind: str, folder: str) -> Any:
    """In float32, as transformers has it."""
    config = AutoConfig.from_pretrained(folder)
    if kind == "none":
        return read_checkpoint(folder, config, torch.float32, _CPU, False).eval()
    return read_quantised(folder, config, scheme_made_here(WeightKind(kind)), torch.float32, _CPU, False).eval()


@torch.inference_mode()
def perplexity(model: Any, ids: list[int], window: int = 512) -> float:
    """Of the tokens behind the first, each by those before it in its window."""
    losses = []
    for first in range(0, len(ids) - 1, window):
        tokens = torch.tensor(ids[first : first + window + 1])
        logits = model(tokens[None, :-1], use_cache=False).logits[0].float()
        losses.append(cross_entropy(logits, tokens[1:], reduction="none"))
    return math.exp(float(torch.cat(losses).mean()))


def golden_ids(folder: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(folder)(TEXT.read_text())["input_ids"])


@dataclass(frozen=True, slots=True)
class _Steps:
    runner: ModelRunner

    def time_ms(self, batch: int) -> float:
        plan = decode_step(batch, _CONTEXT)
        return timed_ms(lambda: self.runner.launch(plan).result(), 1)[0]


def _steps(kind: str, batch: int) -> _Steps:
    settings = engine_settings(1, 512, 16_384)
    loaded = load_model(replace(settings.model, quantise=kind), _CPU)
    pool = KvPool(loaded.kv_layout(16), 512, _CPU)
    runner = ModelRunner(loaded, pool, batch, 2048)
    runner.launch(set_up(batch, _CONTEXT, 16)).result()
    return _Steps(runner)


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.engine.quantised", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kinds", default=",".join(KINDS[1:]))
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = bundled_model_folder()
    ids = golden_ids(folder)
    print(machine_line(describe_machine()))
    exact = perplexity(model_of("none", folder), ids)
    rows = []
    for kind in options.kinds.split(","):
        cost = perplexity(model_of(kind, folder), ids) / exact - 1
        row: dict[str, Any] = {"kind": kind, "perplexity": f"{exact * (1 + cost):.2f} ({cost:+.1%})"}
        for batch in (1, 8):
            whole, rounded = _steps("none", batch), _steps(kind, batch)
            pairs = [(whole.time_ms(batch), rounded.time_ms(batch)) for _ in range(options.repeats)]
            ratio = statistics.median(a / b for a, b in pairs)
            row[f"step of {batch}, ms"] = f"{min(b for _, b in pairs):.1f}"
            row[f"float32 / it, {batch}"] = f"{ratio:.2f}"
        rows.append(row)
    print(f"float32: {exact:.2f} over {len(ids)} tokens")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
