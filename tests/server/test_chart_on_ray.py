"""The Serve config of the chart on a real Ray of two nodes, given to it as the KubeRay operator does; then a node goes.

The head has no CPUs, as in the chart; Ray's token authentication is on; the worker carries the label of its group.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import node_drain
from tests.helm.chart import ALL_VALUES, ROOT, merged, render

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

LABELS = {"splitserve.io/pool": "paired"}
QUESTION = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
STORY = QUESTION | {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 200, "min_tokens": 200}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class LocalRay:
    """A Ray cluster of processes on loopback. `ray stop` is not used: it would end every Ray on the machine."""

    folder: Path
    stack: ExitStack
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    gcs_port: int = field(default_factory=_free_port)
    dashboard_port: int = field(default_factory=_free_port)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs_port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
        }

    def start_head(self) -> None:
        options = ["--head", f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}", "--num-cpus=0"]
        self._start("head", *options, "--dashboard-host=127.0.0.1", f"--temp-dir={self.folder}/r")
        self.wait_for(lambda: self.applications() is not None, 120)

    def start_worker(self, name: str) -> None:
        labels = ",".join(f"{key}={value}" for key, value in LABELS.items())
        self._start(name, f"--address=127.0.0.1:{self.gcs_port}", "--num-cpus=4", f"--labels={labels}")

    def _start(self, name: str, *options: str) -> None:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
        command += ["--object-store-memory=100000000", f"--dashboard-agent-listen-port={_free_port()}", *options]
        environment = {k: v for k, v in {**os.environ, **self.environment}.items() if k != "RAY_ADDRESS"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
        self.stack.callback(self._stop, process)

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def deploy(self, serve_config: dict[str, Any]) -> None:
        """What the operator does with serveConfigV2."""
        answer = self._dashboard("PUT", json=serve_config)
        assert answer.status_code == 200, answer.text

    def applications(self) -> dict[str, Any] | None:
        try:
            answer = self._dashboard("GET")
        except httpx.TransportError:
            return None
        return answer.json()["applications"] if answer.status_code == 200 else None

    def _dashboard(self, method: str, **options: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.dashboard_port}/api/serve/applications/"
        return httpx.request(method, url, headers={"Authorization": f"Bearer {self.token}"}, timeout=30, **options)

    def nodes(self, deployment: str) -> list[str]:
        """Nodes of the running replicas."""
        found = (self.applications() or {})["splitserve"]["deployments"][deployment]["replicas"]
        return [replica["node_id"] for replica in found if replica["state"] == "RUNNING"]

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            logs = [path.read_text()[-1500:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline_s, f"{self.applications()}\n{logs}"
            time.sleep(0.5)


@pytest.fixture
def local_ray(tmp_path: Path) -> Iterator[LocalRay]:
    with ExitStack() as stack:
        yield LocalRay(_short(stack), stack)


def _short(stack: ExitStack) -> Path:
    """Ray's sockets need short paths."""
    import tempfile

    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssr", dir="/tmp", ignore_cleanup_errors=True)))


def _is_running(ray: LocalRay) -> bool:
    application = (ray.applications() or {}).get("splitserve", {})
    assert application.get("status") != "DEPLOY_FAILED", application
    return application.get("status") == "RUNNING"


@contextmanager
def _asking(url: str) -> Iterator[list[str]]:
    """Asks one question after the other meanwhile; the answers, or what went wrong."""
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(_answer(url, QUESTION))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join(120)


def _answer(url: str, body: dict[str, Any]) -> str:
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    except httpx.HTTPError as error:
        return repr(error)
    text = answer.text if answer.status_code != 200 else answer.json()["choices"][0]["message"]["content"]
    return str(text)


def test_runs_what_the_chart_deploys_and_loses_nothing_with_a_node(
    local_ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _free_port()
    labelled = {"node_labels": LABELS}
    changes = {"server": {"port": port}, "ingress": labelled, "pools": {"prefill": labelled, "decode": labelled}}
    rendered = render(merged(ALL_VALUES["cpu-try-out"], {"config": changes}))
    assert rendered.groups["paired"]["labels"] == LABELS
    local_ray.start_head()
    local_ray.start_worker("first")
    local_ray.deploy(rendered.serve_config)
    local_ray.wait_for(lambda: _is_running(local_ray), 300)

    url = f"http://127.0.0.1:{port}"
    expected = _answer(url, QUESTION)
    story = _answer(url, STORY)
    assert "Paris" in expected
    assert httpx.get(f"{url}/health/ready", timeout=10).status_code == 200
    assert "splitserve_build_info" in httpx.get(f"{url}/metrics", timeout=10).text
    (first,) = {node for name in ("ingress", "prefill", "decode") for node in local_ray.nodes(name)}

    local_ray.start_worker("second")
    for name, value in local_ray.environment.items():
        monkeypatch.setenv(name, value)
    with _asking(url) as answers:
        long_stories: list[str] = []
        thread = threading.Thread(target=lambda: long_stories.append(_answer(url, STORY)))
        thread.start()
        time.sleep(1)
        assert node_drain.ask_to_drain(120, first) is None

        def has_moved() -> bool:
            return all(local_ray.nodes(name) not in ([], [first]) for name in ("ingress", "prefill", "decode"))

        local_ray.wait_for(has_moved, 240)
        thread.join(180)
    assert long_stories == [story]
    assert len(answers) >= 3
    assert set(answers) == {expected}
