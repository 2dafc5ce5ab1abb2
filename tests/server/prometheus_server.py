"""A real Prometheus on loopback that scrapes one server and evaluates our rules."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.monitoring.dashboard_file import ROOT
from tests.server.local_ray import free_port

SCRAPE_INTERVAL_S = 2
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def get(self, path: str, **params: Any) -> Any:
        response = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=120)
        answer = response.json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def value(self, promql: str) -> float:
        """Of the one series that an expression has now; 0.0 when there is none."""
        result = self.get("query", query=promql)["result"]
        assert len(result) <= 1, promql
        return float(result[0]["value"][1]) if result else 0.0

    def series(self, promql: str, start_s: float, end_s: float, step_s: float) -> list[tuple[dict[str, str], Points]]:
        """Labels and (time, value) of each series, those left out that have no finite value."""
        result = self.get("query_range", query=promql, start=start_s, end=end_s, step=step_s)["result"]
        found = [(one["metric"], [(float(t), float(v)) for t, v in one["values"]]) for one in result]
        return [(labels, points) for labels, points in found if any(math.isfinite(value) for _, value in points)]

    def wait_for_scrape(self, timeout_s: float = 120.0) -> None:
        """Return when a scrape that began after this call is in."""
        began_s, deadline_s = time.time(), time.monotonic() + timeout_s
        while self.value("max(timestamp(up))") <= began_s:
            assert time.monotonic() < deadline_s, self.get("targets")
            time.sleep(0.2)


@contextmanager
def run_prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """target: host:port of the server."""
    config = yaml.safe_load((ROOT / "docs/prometheus.yaml").read_text())  # what docs/runbook.md offers
    config["global"] = {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "evaluation_interval": f"{SCRAPE_INTERVAL_S}s"}
    config["rule_files"] = [str(ROOT / "docs" / file) for file in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield _when_ready(Prometheus(f"http://127.0.0.1:{port}"), process, folder / "prometheus.log")
    finally:
        process.terminate()
        process.wait(120)


def _when_ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    deadline_s = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        try:
            if httpx.get(f"{prometheus.url}/-/ready").status_code == 200:
                return prometheus
        except httpx.TransportError:
            pass
        time.sleep(0.2)
