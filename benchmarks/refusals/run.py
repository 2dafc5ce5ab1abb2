"""The benchmark from start to end, as data and as tables."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real_server import real_server
from benchmarks.refusals.bodies import Kind, large_kinds, small_kinds
from benchmarks.refusals.exchange import exchange
from cluster.load.tables import table

_CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
_SENDERS = 2  # at once, each one body after another
_BYSTANDERS = ("health", "tokenize", "stream")


def run_refusals_benchmark(short: bool) -> dict[str, Any]:
    """Starts and stops a server. Blocks for two minutes, or five. Raises AssertionError where an answer is not the
    refusal that is expected."""
    with (
        tempfile.TemporaryDirectory() as folder,
        real_server(yaml.safe_load(_CONFIG.read_text()), Path(folder)) as url,
    ):
        small, large = small_kinds(), large_kinds()
        refusals = [_refuse(url, kind, 20 if short else 100) for kind in small]
        refusals += [_refuse(url, kind, 5 if short else 20) for kind in large]
        seconds = 3.0 if short else 8.0
        bystanders = {"nothing": _bystand(url, seconds)}
        with _flood(url, small):
            bystanders["all small ones"] = _bystand(url, seconds)
        for kind in large:
            with _flood(url, [kind]):
                bystanders[kind.name] = _bystand(url, seconds)
    return {"refusals": refusals, "bystanders": bystanders}


def _refuse(url: str, kind: Kind, num_times: int) -> dict[str, Any]:
    exchange(url, kind)  # the first one of a kind may import something
    times_ms = [1000 * _expected(url, kind) for _ in range(num_times)]
    return {
        "kind": kind.name,
        "bytes": len(kind.body),
        "status": kind.status,
        "p50_ms": statistics.median(times_ms),
        "max_ms": max(times_ms),
    }


def _expected(url: str, kind: Kind) -> float:
    status, seconds = exchange(url, kind)
    assert status == kind.status, f"{kind.name}: {status} instead of {kind.status}"
    return seconds


@contextmanager
def _flood(url: str, kinds: list[Kind]) -> Iterator[None]:
    """Sent without a pause while the context lasts."""
    over = threading.Event()
    failures: list[BaseException] = []

    def send() -> None:
        try:
            while not over.is_set():
                for kind in kinds:
                    _expected(url, kind)
        except BaseException as error:
            failures.append(error)

    senders = [threading.Thread(target=send) for _ in range(_SENDERS)]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        over.set()
        for sender in senders:
            sender.join()
    if failures:
        raise failures[0]


def _bystand(url: str, seconds: float) -> dict[str, Any]:
    """p50 and largest of each bystander's times, in ms."""
    command = [sys.executable, "-m", "benchmarks.refusals.bystander", url, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=_CONFIG.parents[1])
    times_ms = json.loads(done.stdout)
    return {
        name: {"p50_ms": statistics.median(times_ms[name]), "max_ms": max(times_ms[name])}
        for name in _BYSTANDERS
        if times_ms[name]
    }


def refusals_tables(result: dict[str, Any]) -> str:
    """For people."""
    refused = [
        [row["kind"], f"{row['bytes']:,}", row["status"], f"{row['p50_ms']:.1f}", f"{row['max_ms']:.1f}"]
        for row in result["refusals"]
    ]
    beside = [
        [name, *(f"{row[who]['p50_ms']:.0f} / {row[who]['max_ms']:.0f}" if who in row else "-" for who in _BYSTANDERS)]
        for name, row in result["bystanders"].items()
    ]
    return "\n\n".join(
        [
            "refused, one at a time, each over a connection of its own",
            table(["body", "bytes", "status", "p50 ms", "max ms"], refused),
            f"others meanwhile, ms, p50 / max: {_SENDERS} senders without a pause",
            table(["sent", "/health", "/tokenize", "gap of a stream"], beside),
        ]
    )
