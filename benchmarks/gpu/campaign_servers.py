"""Servers on one card under loads of chosen rates: a campaign's served pieces.

Each starts its server once and then makes its runs: fixed ones first, then those that a search asks for. Runs that
earlier calls made are not made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

from benchmarks.gpu import cache_load, mask_load, saturated_load
from benchmarks.gpu.cache_load import CacheLoad
from benchmarks.gpu.campaign_record import CampaignRecord, Line
from benchmarks.gpu.goodput_search import Limits, next_rate
from benchmarks.gpu.mask_load import Burst
from benchmarks.gpu.recorded_steps import read_steps, told
from benchmarks.gpu.saturated_load import SaturatedLoad
from benchmarks.gpu.served import our_config
from benchmarks.gpu.vllm_servers import SERVED_NAME, VllmPlace, vllm_servers
from benchmarks.real_server import real_server
from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.percentile import percentile
from cluster.load.processes import run_load
from cluster.load.report import summarise, warnings

_PERCENTILES = (50, 90, 99)
_TAIL_S = 8.0  # of a run: warm-up, and its last requests
METRICS = ("splitserve_slow_transfers", "splitserve_kv_transfer_rate_bytes_per_second", "splitserve_retries_total")
METRICS += ("splitserve_lane_steps_total", "splitserve_requests_total", "splitserve_router_decisions_total")
METRICS += ("splitserve_router_roles_total",)

_Measure = Callable[[str], bool]  # of the URL: whether all of it is measured now


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens in and out, limits, how many requests a run has, and where a search begins."""

    name: str
    num_in: int
    num_out: int
    limits: Limits
    count: int
    first_rate: float


@dataclass(frozen=True, slots=True)
class ServedPiece:
    """One server. runs: (workload, rate). searches: workloads. changes: of the config, by dotted keys. start_s: until
    it is ready, about. reads_bytes_per_s: its transport is made so slow. has_records: what its steps took is told.
    masks_as, saturated_as, cache_as: the piece under which it is noted what masks cost, how long steps are beside a
    saturated prefill, and what the prefix cache brings, which vLLM has then, and else not; None: that is not measured.
    num_cards: searches begin at as many times the rate; vLLM has a server on each. flags: of vLLM's command line.
    hands_over: its first server computes prompts for its second."""

    name: str
    config: str | None  # None: vLLM
    start_s: float
    runs: tuple[tuple[str, float], ...]
    searches: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    reads_bytes_per_s: float | None = None
    has_records: bool = False
    masks_as: str | None = None
    saturated_as: str | None = None
    cache_as: str | None = None
    num_cards: int = 1
    flags: tuple[str, ...] = ()
    hands_over: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where servers start, and with what. most_runs: of a search. is_time_for: whether so many seconds are left."""

    folder: Path
    logs: Path
    configs: Path
    workloads: dict[str, Workload]
    vllm_site: Path | None
    num_processes: int
    most_runs: int
    known_runs: tuple[Line, ...]  # vLLM's, of earlier machines
    overrides: dict[str, Any]  # of every config of ours
    is_time_for: Callable[[float], bool]
    burst: Burst = field(default_factory=Burst)
    cache_load: CacheLoad = field(default_factory=CacheLoad)
    saturated_load: SaturatedLoad = field(default_factory=SaturatedLoad)


def serve_piece(piece: ServedPiece, place: Place, record: CampaignRecord) -> bool:
    """Whether all of it is done now. Raises what the server's start raises."""
    todo = list(todo_of(piece, place, record))
    first, last = _beside_runs(piece, place, record)
    if not todo and not first and not last:
        return True
    if not place.is_time_for(piece.start_s + (_run_s(place, todo[0]) if todo else _TAIL_S)):
        return False
    started_s = time.monotonic()
    with running(piece, place) as url:
        record.add({"piece": piece.name, "workload": None, "ready_s": round(time.monotonic() - started_s, 1)})
        print(f"{piece.name}: ready after {time.monotonic() - started_s:.0f} s", flush=True)
        if not all(measure(url) for measure in first):
            return False
        while todo := list(todo_of(piece, place, record)):
            workload, rate = todo[0]
            if not place.is_time_for(_run_s(place, todo[0])):
                return False
            record.add(run_at(url, piece.name, place.workloads[workload], rate, place.num_processes))
        if not all(measure(url) for measure in last):
            return False
        if piece.config is not None:
            record.add({"piece": piece.name, "workload": None, "metrics": _metrics(url)})
    if piece.has_records:
        steps = {pool: told(records) for pool, records in read_steps(_records_of(piece, place)).items()}
        record.add({"piece": piece.name, "workload": None, "steps": steps})
    if piece.reads_bytes_per_s is not None and not (place.logs / piece.name / "faults" / "did.slow.reads").exists():
        record.add({"piece": piece.name, "workload": None, "error": "no read was slowed: nothing was tested"})
    return True


def _beside_runs(piece: ServedPiece, place: Place, record: CampaignRecord) -> tuple[list[_Measure], list[_Measure]]:
    """What is still to be measured beside the runs: before them, and after them, when the cache may be full."""
    first: list[_Measure] = []
    last: list[_Measure] = []
    asked: dict[str, Any] = {"model": SERVED_NAME, "record": record, "is_time_for": place.is_time_for}
    if (name := piece.masks_as) is not None and mask_load.missing(name, place.burst, record):
        first.append(partial(mask_load.measure_over_http, piece=name, burst=place.burst, **asked))
    if (name := piece.saturated_as) is not None and saturated_load.missing(name, place.saturated_load, record):
        first.append(partial(saturated_load.measure_over_http, piece=name, load=place.saturated_load, **asked))
    if (name := piece.cache_as) is not None and cache_load.missing(name, place.cache_load, record):
        last.append(partial(cache_load.measure_over_http, piece=name, load=place.cache_load, **asked))
    return first, last


def todo_of(piece: ServedPiece, place: Place, record: CampaignRecord) -> Iterator[tuple[str, float]]:
    """What is still to be run. Of a search the next rate only."""
    yield from [run for run in piece.runs if record.of(piece.name, *run) is None]
    for name in piece.searches:
        workload = place.workloads[name]
        points = record.points(piece.name, name, workload.limits)
        if piece.config is None and piece.num_cards == 1:
            kept = CampaignRecord((), ())
            kept.lines = [{**line, "piece": piece.name} for line in place.known_runs]
            rates = {point.rate for point in points}
            points += [p for p in kept.points(piece.name, name, workload.limits) if p.rate not in rates]
        num_tried = len(record.points(piece.name, name, workload.limits))
        rate = next_rate(points, workload.first_rate * piece.num_cards)
        if rate is not None and num_tried < place.most_runs:
            yield name, rate


def _run_s(place: Place, run: tuple[str, float]) -> float:
    workload = place.workloads[run[0]]
    return workload.count / run[1] + _TAIL_S


def run_at(url: str, piece: str, workload: Workload, rate: float, num_processes: int) -> Line:
    """One run; prints a line of it."""
    plan = LoadPlan(
        target=Target(url, SERVED_NAME),
        rate_per_s=rate,
        num_requests=workload.count,
        inputs=LengthRange(workload.num_in, workload.num_in),
        outputs=LengthRange(workload.num_out, workload.num_out),
        num_processes=num_processes,
        num_warmup=3,
        timeout_s=180.0,
        body={"temperature": 0.0, "ignore_eos": True},
    )
    result = run_load(plan)
    summary = summarise(plan, result, {})
    seconds = [1e3 * record.itl_s[0] for record in result.records if record.is_ok and record.itl_s]
    line: Line = {"piece": piece, "workload": workload.name, "rate": rate, "count": workload.count}
    line |= {name: summary[name] for name in ("completed", "failed", "request_throughput")}
    for metric in ("ttft", "tpot", "itl"):
        for share in _PERCENTILES:
            name = "median" if share == 50 else f"p{share}"
            line[f"p{share}_{metric}_ms"] = round(summary.get(f"{name}_{metric}_ms", float("nan")), 2)
    line["p90_second_token_ms"] = round(percentile(seconds, 90), 2) if seconds else None
    line["p99_second_token_ms"] = round(percentile(seconds, 99), 2) if seconds else None
    line["ratio"] = round(workload.limits.ratio(line), 3)
    line["warnings"] = warnings(summary)
    cells = " ".join(
        f"{m} " + "/".join(f"{line[f'p{p}_{m}_ms']:.1f}" for p in _PERCENTILES) for m in ("ttft", "tpot", "itl")
    )
    print(
        f"{piece} {workload.name} at {rate:g}: {line['failed']} failed, {cells}, {line['ratio']} of its limits",
        flush=True,
    )
    return line


@contextmanager
def running(piece: ServedPiece, place: Place) -> Iterator[str]:
    """The URL of the piece's servers, until the end. Blocks for a minute or two."""
    logs = place.logs / piece.name
    logs.mkdir(parents=True, exist_ok=True)
    if piece.config is None:
        if place.vllm_site is None:
            raise ValueError("vLLM is measured where --vllm-site says that it is")
        max_model_len = max(load.num_in + load.num_out for load in place.workloads.values()) + 64
        vllm = VllmPlace(place.vllm_site, place.folder, logs, max_model_len)
        has_cache, hands_over = piece.cache_as is not None, piece.hands_over
        with vllm_servers(
            vllm, piece.num_cards, has_prefix_cache=has_cache, hands_over=hands_over, flags=piece.flags
        ) as url:
            yield url
        return
    config = our_config(place.configs / piece.config, place.folder)
    for key, value in {**piece.changes, **place.overrides}.items():
        _change(config, key, value)
    if piece.cache_as is None:  # runs of a campaign have the same prompts
        _change(config, "prefix_cache.enabled", False)
    if piece.reads_bytes_per_s is not None:
        faults = logs / "faults"
        faults.mkdir(exist_ok=True)
        (faults / "slow.reads").write_text(f"{piece.reads_bytes_per_s:g}")
        _change(config, "testing.fault_dir", str(faults))
    if piece.has_records:
        _records_of(piece, place).mkdir(exist_ok=True)
        _change(config, "testing.step_record_dir", str(_records_of(piece, place)))
    (logs / "given.yaml").write_text(yaml.safe_dump(config))
    with real_server(config, logs) as url:
        yield url


def _records_of(piece: ServedPiece, place: Place) -> Path:
    return place.logs / piece.name / "steps"


def _change(config: dict[str, Any], key: str, value: object) -> None:
    """Of sections that the config has; of a pool only where it has that pool."""
    *sections, name = key.split(".")
    if sections[:1] == ["pools"] and sections[1] not in config["pools"]:
        return
    section = config
    for part in sections:
        section = section.setdefault(part, {})
    section[name] = value


def _metrics(url: str) -> list[str]:
    """Lines of /metrics that say how the run went."""
    with urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return [line for line in lines if line.startswith(METRICS)]
