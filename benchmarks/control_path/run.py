"""The control-path benchmark behind each of Serve's proxies, as data and as tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.config.service import ServeProxy
from cluster.http.serve_proxy import local_environment
from cluster.load.tables import table

PROXIES: tuple[ServeProxy, ...] = ("serve", "haproxy")
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 600.0
_FIXED = {
    "PYTHONPATH": str(_ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "HF_HUB_OFFLINE": "1",
}


def run_control_path_benchmark(proxies: Sequence[ServeProxy], short: bool) -> dict[str, Any]:
    """Results by proxy; {"error": ...} for one that failed. Blocks for about a minute a proxy."""
    return {proxy: _run_behind(proxy, short) for proxy in proxies}


def _run_behind(proxy: ServeProxy, short: bool) -> dict[str, Any]:
    """In a network of its own that is loopback and nothing else: HAProxy and some of Ray bind to every interface."""
    # Without any other of Serve's switches.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")} | _FIXED
    with tempfile.TemporaryDirectory() as folder, local_environment(proxy, ours) as own:
        output = Path(folder) / "result.json"
        command = [sys.executable, "tests/loopback_only.py", sys.executable, "-m", "benchmarks.control_path.one_mode"]
        command += [str(output), *(["--short"] if short else [])]
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                env=ours | own,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
                text=True,
            )
        except subprocess.TimeoutExpired:  # Ray's processes end with the one that started them
            return {"error": f"not done within {_TIMEOUT_S:g} s"}
        if done.returncode or not output.exists():
            return {"error": "\n".join(done.stderr.splitlines()[-15:])}
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def control_path_tables(result: dict[str, Any]) -> str:
    """For people."""
    latency, streams, errors = [], [], []
    for proxy, measured in result.items():
        if "error" in measured:
            errors.append(f"{proxy} failed:\n{measured['error']}")
            continue
        latency += [
            [proxy, path, f"{row['p50_ms']:.1f}", f"{row['p90_ms']:.1f}", f"{row['p99_ms']:.1f}"]
            for path, row in measured["latency"].items()
        ]
        streams += [_stream_row(proxy, row) for row in measured["streams"]]
    return "\n\n".join(
        [
            "one request at a time, max_tokens 2, not streamed",
            table(["proxy", "path", "p50 ms", "p90 ms", "p99 ms"], latency),
            "all streams at once, one token each every 7 ms",
            table(["proxy", "path", "streams", "tok/s", "TTFT p50", "ITL p50", "ITL p99", "CPU us a token"], streams),
            *errors,
        ]
    )


def _stream_row(proxy: str, row: dict[str, Any]) -> list[str]:
    cpu = ", ".join(f"{name} {value:.0f}" for name, value in row["cpu_us_per_token"].items())
    times = [f"{row[name]:.1f}" for name in ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")]
    return [proxy, row["path"], str(row["streams"]), f"{row['tokens_per_s']:.0f}", *times, cpu]
