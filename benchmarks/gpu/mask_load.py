"""What masks cost: one JSON schema, 64 streams at once that it holds, and 64 that nothing does.

Answers are cut before they can end, so both kinds have as many tokens. Random weights choose from all that the schema
allows: names with many tokens, and keys and values with few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.gpu.campaign_record import CampaignRecord, Line
from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.processes import run_load
from cluster.load.report import summarise, warnings
from scheduler.sampling_params import SamplingParams

_MEMBER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["red", "green", "blue"]},
        "is_open": {"type": "boolean"},
    },
    "required": ["id", "name", "kind", "is_open"],
    "additionalProperties": False,
}
# A member has eight tokens or more: no answer of 256 tokens is complete.
SCHEMA: dict[str, Any] = {"type": "array", "items": _MEMBER, "minItems": 64}
WAYS = {"greedy": SamplingParams(0.0), "sampled": SamplingParams(0.8, top_k=50, top_p=0.95, seed=1)}
KINDS = ("plain", "held")
# The share that a step of rows with masks may take more, in percent.
TO_REACH = 2.0
_NUM_REPEATS = 2
_ABOUT_S = 8.0  # of one run, its client's start and warm-up included


@dataclass(frozen=True, slots=True)
class Burst:
    """Streams that all begin at once. num_in, num_out: tokens of each."""

    num_streams: int = 64
    num_in: int = 256
    num_out: int = 256
    num_processes: int = 4

    def name(self, way: str, kind: str) -> str:
        return f"{self.num_streams}x{self.num_out} {way} {kind}"


def body_of(way: str, kind: str) -> dict[str, Any]:
    """Fields of a request that ours and vLLM read alike."""
    params = WAYS[way]
    body: dict[str, Any] = {"temperature": params.temperature, "ignore_eos": True}
    if params.temperature:
        body |= {"top_k": params.top_k, "top_p": params.top_p, "seed": params.seed}
    return body | ({"structured_outputs": {"json": SCHEMA}} if kind == "held" else {})


def burst_over_http(url: str, model: str, piece: str, burst: Burst, way: str, kind: str) -> Line:
    """One run, and its line. Blocks for some seconds; raises what `run_load` raises."""
    plan = LoadPlan(
        target=Target(url, model),
        rate_per_s=math.inf,
        num_requests=burst.num_streams,
        inputs=LengthRange(burst.num_in, burst.num_in),
        outputs=LengthRange(burst.num_out, burst.num_out),
        num_processes=burst.num_processes,
        num_warmup=1,
        timeout_s=120.0,
        body=body_of(way, kind),
    )
    summary = summarise(plan, run_load(plan), {})
    line: Line = {"piece": piece, "workload": burst.name(way, kind)}
    line |= {name: summary[name] for name in ("completed", "failed", "errors", "short_outputs")}
    for name in ("median_tpot", "p90_tpot", "median_itl", "p99_itl", "median_ttft"):
        line[f"{name}_ms"] = round(summary.get(f"{name}_ms", math.nan), 3)
    return line | {"warnings": warnings(summary)}


def measure_over_http(
    url: str, model: str, piece: str, burst: Burst, record: CampaignRecord, is_time_for: Callable[[float], bool]
) -> bool:
    """Whether all runs are made now. Those that are recorded are not made again. What goes wrong is recorded."""
    try:
        record.add({"piece": piece, "workload": None, "begins": held_text(url, model)})
        for way, kind in missing(piece, burst, record):
            if not is_time_for(_NUM_REPEATS * _ABOUT_S):
                return False
            runs = [burst_over_http(url, model, piece, burst, way, kind) for _ in range(_NUM_REPEATS)]
            line = min(runs, key=lambda run: (run["failed"], run["median_tpot_ms"]))
            print(f"{piece} {line['workload']}: {line['failed']} failed, TPOT {line['median_tpot_ms']} ms", flush=True)
            record.add(line | {"median_tpots_ms": [run["median_tpot_ms"] for run in runs]})
    except Exception as error:
        record.add({"piece": piece, "workload": None, "error": f"{type(error).__name__}: {error}"[:1500]})
        print(f"{piece} went wrong: {error}", flush=True)
    return True


def missing(piece: str, burst: Burst, record: CampaignRecord) -> list[tuple[str, str]]:
    """Ways and kinds that no line is there of, in the order of the runs, which are compared in pairs."""
    runs = [(way, kind) for way in WAYS for kind in KINDS]
    return [(way, kind) for way, kind in runs if record.of(piece, burst.name(way, kind)) is None]


def held_text(url: str, model: str) -> str:
    """How an answer by the schema begins. Raises RuntimeError for one that is not by it: some servers ignore fields
    that they do not know."""
    body = body_of("greedy", "held") | {"model": model, "prompt": [1_000] * 8, "max_tokens": 96}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["text"]
    if text.strip() and not text.lstrip().startswith("["):
        raise RuntimeError(f"no text by the schema: {text[:80]!r}")
    return text


def cost_rows(record: CampaignRecord, verdict: Callable[[float, float], str]) -> list[list[Any]]:
    """Cells of a table: what was measured, ms plain and held, percent more; of ours the same to reach, and a verdict.

    verdict: of ms, and the most that they may be.
    """
    rows = []
    for name, (plain_ms, held_ms) in _pairs(record).items():
        more = f"{100 * (held_ms / plain_ms - 1):+.1f}"
        judged = ["-", ""] if name.startswith("vllm") else [f"{TO_REACH:g}", verdict(held_ms, _most(plain_ms))]
        rows.append([name, f"{plain_ms:g}", f"{held_ms:g}", more, *judged])
    return rows


def _most(plain_ms: float) -> float:
    return plain_ms * (1 + TO_REACH / 100)


def _pairs(record: CampaignRecord) -> Mapping[str, tuple[float, float]]:
    found = {}
    alone = record.of("masks") or {}
    for name in alone:
        if name.endswith("_plain_ms") and (held_ms := alone.get(name.replace("_plain_ms", "_held_ms"))) is not None:
            found[f"masks, {name.removesuffix('_plain_ms').replace('_', ' ')} rows"] = (alone[name], held_ms)
    for line in record.lines:
        workload = str(line.get("workload"))
        if workload.endswith(" plain") and (held := record.of(line["piece"], workload[:-5] + "held")) is not None:
            found[f"{line['piece']}, {workload[:-6]}"] = (line["median_tpot_ms"], held["median_tpot_ms"])
    return found
