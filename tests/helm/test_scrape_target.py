"""The relabelings of the ServiceMonitor, in a real Prometheus: several pods behind the service are one target."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helm.chart import ALL_VALUES, render
from tests.server.local_ray import free_port

PROMETHEUS = shutil.which("prometheus")
PODS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"),
]


class _Metrics(BaseHTTPRequestHandler):
    """What an ingress answers: series of every replica, with labels of their own."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b'requests_total{pod="own",replica="decode-1"} 7\n')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def ingress() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def _scrape_config(address: str) -> dict[str, Any]:
    """What the Prometheus operator makes of the ServiceMonitor, the pods behind the service written out."""
    (monitor,) = render(ALL_VALUES["multi-host-rdma"]).of_kind("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    names = {"targetLabel": "target_label", "sourceLabels": "source_labels"}
    ours = [{names.get(key, key): value for key, value in rule.items()} for rule in endpoint["relabelings"]]
    ours[0]["replacement"] = address  # a name that only a cluster can resolve
    # The operator's own come first: they tell pods apart.
    theirs = [
        {"source_labels": ["__meta_pod"], "target_label": label} for label in ("pod", "node", "container", "endpoint")
    ]
    targets = [{"targets": [pod], "labels": {"__meta_pod": pod, "namespace": "llm"}} for pod in PODS]
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {
                "job_name": "splitserve",
                "metrics_path": endpoint["path"],
                "honor_labels": endpoint["honorLabels"],
                "static_configs": targets,
                "relabel_configs": [*theirs, *ours],
            }
        ],
    }


def _query(url: str, text: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": text})
    answer.raise_for_status()  # 503 while it starts
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def test_counts_everything_once(ingress: str, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(_scrape_config(ingress)))
    port = free_port()
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    options.append(f"--web.listen-address=127.0.0.1:{port}")
    process = subprocess.Popen([str(PROMETHEUS), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 120
        # Of one moment: a scrape takes a second at most, and where this process stands still for longer it has failed.
        found: list[dict[str, Any]] = []
        while not any(one["metric"]["__name__"] == "requests_total" for one in found):
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
            with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                found = _query(url, '{__name__=~"up|requests_total"}')
        (up,) = (one for one in found if one["metric"]["__name__"] == "up")
        assert up["value"][1] == "1"
        assert not {"pod", "node", "container", "endpoint"} & set(up["metric"])
        (series,) = (one for one in found if one["metric"]["__name__"] == "requests_total")
        # The labels that series have themselves are kept.
        assert series["metric"]["pod"] == "own"
        assert series["value"][1] == "7"
    finally:
        process.terminate()
        process.wait(60)
