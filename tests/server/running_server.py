"""`splitserve serve` as a user runs it: a process of its own, real Ray, HTTP on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.local_ray import free_port

ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 900.0  # seconds where cores are free, minutes where a dozen tests share two
_UNUSED = ("free", "cached")  # states of KV blocks that nobody needs


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    log_file: Path  # what the terminal shows
    replica_log: Path  # what Ray and all replicas say
    fault_dir: Path
    process: subprocess.Popen[bytes]

    def client(self, timeout_s: float = 300.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s)

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """Every sample of /metrics: name, labels, value."""
        text = httpx.get(f"{self.url}/metrics", timeout=120).text
        return [
            (sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric over all replicas, of the samples with these labels."""
        samples = self.metrics()
        assert any(sample[0] == name for sample in samples), f"no metric {name}"
        return sum(v for n, got, v in samples if n == name and labels.items() <= got.items())

    def log(self) -> str:
        """All that was said."""
        return "".join(file.read_text() for file in (self.log_file, self.replica_log) if file.exists())

    def hold(self, point: str) -> None:
        (self.fault_dir / f"hold.{point}").touch()

    def was_held(self, point: str) -> bool:
        return (self.fault_dir / f"did.hold.{point}").exists()

    def clear_faults(self) -> None:
        for path in self.fault_dir.iterdir():
            path.unlink()

    def held(self) -> dict[str, float]:
        """What is not at its baseline, anywhere; empty when all is."""
        samples = self.metrics()
        blocks = [s for s in samples if s[0] == "splitserve_kv_blocks" and s[1]["state"] not in _UNUSED]
        open_work = [
            s
            for s in samples
            if s[0] in ("splitserve_kv_transfers_open", "splitserve_requests_in_flight", "splitserve_requests_queued")
        ]
        assert blocks
        assert open_work
        return {f"{name}{labels}": value for name, labels, value in blocks + open_work if value}

    def wait_for_baseline(self, timeout_s: float = 120.0) -> None:
        """Return when nothing is held in any process; fail the test when that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while held := self.held():
            assert time.monotonic() < deadline_s, held
            time.sleep(0.05)


@contextmanager
def run_server(
    config_file: str, folder: Path, changes: dict[str, Any] | None = None, exit_code: int = 0
) -> Iterator[RunningServer]:
    """Start with a shipped config, changed by dotted keys; stop and check that it stopped cleanly."""
    config = yaml.safe_load((ROOT / "configs" / config_file).read_text())
    fault_dir = folder / "faults"
    fault_dir.mkdir()
    replica_log = folder / "replicas.log"
    ours = {"testing.fault_dir": str(fault_dir), "logging.file": str(replica_log)}
    for key, value in {**ours, **(changes or {})}.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with run_serve([str(path)], folder, exit_code=exit_code) as server:
        yield server


@contextmanager
def run_serve(
    arguments: list[str], folder: Path, variables: Mapping[str, str] | None = None, exit_code: int = 0
) -> Iterator[RunningServer]:
    """Likewise, with what is typed behind `splitserve serve`. folder: its log; and if it is told of
    them its replicas' log and its faults. exit_code: with which it is to end.
    """
    port = free_port()
    log_file, replica_log, fault_dir = (folder / name for name in ("server.log", "replicas.log", "faults"))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled", **(variables or {})}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.serving.command_line", "serve", *arguments, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", log_file, replica_log, fault_dir, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == exit_code, server.log()[-3000:]


def _wait_until_ready(server: RunningServer) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while b"  curl " not in server.log_file.read_bytes():
        assert server.process.poll() is None, server.log()[-5000:]
        assert time.monotonic() < deadline_s, server.log()[-5000:]
        time.sleep(0.2)
