"""A Ray cluster of processes on this machine, given Serve configs as the KubeRay operator does."""

from __future__ import annotations

import functools
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.config.service import INGRESS_PORTS

ROOT = Path(__file__).parents[2]
_STARTS = 4  # of a head


def free_port() -> int:
    """None of those that the system gives to whoever asks for any, or connects: one of them could be gone before a
    server listens there, seconds later. Nor one that Ray gives away, or that HAProxy needs beside the server's."""
    for port in random.SystemRandom().sample(range(20_000, INGRESS_PORTS.start), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports are taken")


@dataclass
class LocalRay:
    """A Ray cluster of processes on loopback. `ray stop` is not used: it would end every Ray on the machine."""

    folder: Path
    stack: ExitStack
    labels: Mapping[str, str]
    redis_address: str | None = None  # where its GCS keeps its state; None: in its memory
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    gcs_port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs_port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            **({} if self.redis_address is None else self._of_a_store(self.redis_address)),
        }

    @staticmethod
    def _of_a_store(redis_address: str) -> dict[str, str]:
        """With the patience that KubeRay gives workers then: a new head may take longer than Ray's own minute."""
        return {"RAY_REDIS_ADDRESS": redis_address, "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}

    def start_head(self) -> subprocess.Popen[bytes]:
        """Each has a folder of its own, as a new pod has: Ray takes the address that the last one wrote there, which
        the workers' command lines name too, for a GCS that runs, and refuses to start another. One that ends as it
        starts, as Ray's does after 30 s on a machine with much else to do, is started again, as a pod is.
        """
        for _ in range(_STARTS):
            folder = tempfile.mkdtemp(prefix="h", dir=self.folder)
            options = ["--head", f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}", "--num-cpus=0"]
            process = self._start("head", *options, "--dashboard-host=127.0.0.1", f"--temp-dir={folder}")
            self.wait_for(functools.partial(self._is_up_or_over, process), 120)
            if process.poll() is None:
                return process
        raise AssertionError(f"no head of {_STARTS} has come up: {(self.folder / 'head.log').read_text()[-3000:]}")

    def _is_up_or_over(self, process: subprocess.Popen[bytes]) -> bool:
        return process.poll() is not None or self.applications() is not None

    def start_worker(self, name: str, proxy_port: int | None = None) -> subprocess.Popen[bytes]:
        """proxy_port: of Serve's proxy on this node alone; None: all nodes' proxies share the config's."""
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        own = {} if proxy_port is None else {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(proxy_port)}
        options = [f"--address=127.0.0.1:{self.gcs_port}", "--num-cpus=4", f"--labels={labels}"]
        return self._start(name, *options, **own)

    def _start(self, name: str, *options: str, **own: str) -> subprocess.Popen[bytes]:
        """own: what its environment has besides."""
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
        command += ["--object-store-memory=100000000", f"--dashboard-agent-listen-port={free_port()}", *options]
        environment = {k: v for k, v in {**os.environ, **self.environment, **own}.items() if k != "RAY_ADDRESS"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
        self.stack.callback(self._stop, process)
        return process

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)

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
        return httpx.request(method, url, headers={"Authorization": f"Bearer {self.token}"}, timeout=120, **options)

    @property
    def is_running(self) -> bool:
        """Whether all that was deployed last runs. Fails the test when it can't."""
        application = (self.applications() or {}).get("splitserve", {})
        assert application.get("status") != "DEPLOY_FAILED", application
        return application.get("status") == "RUNNING"

    def replicas(self, deployment: str) -> dict[str, str]:
        """Running ones: the node of each, by its id."""
        found = (self.applications() or {})["splitserve"]["deployments"][deployment]["replicas"]
        return {replica["replica_id"]: replica["node_id"] for replica in found if replica["state"] == "RUNNING"}

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            logs = [path.read_text()[-1500:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline_s, f"{self.applications()}\n{logs}"
            time.sleep(0.5)


def start_local_ray(stack: ExitStack, labels: Mapping[str, str], redis_address: str | None = None) -> LocalRay:
    """With a head of no CPUs. labels: of the workers' nodes."""
    # Ray's sockets need short paths.
    folder = tempfile.TemporaryDirectory(prefix="ssr", dir="/tmp", ignore_cleanup_errors=True)
    ray = LocalRay(Path(stack.enter_context(folder)), stack, labels, redis_address)
    ray.start_head()
    return ray
