"""What a person sees of a real server, in a pipe and in a terminal: its start, its log, and its end by Ctrl-C.

Servers of its own, about four minutes: `make test ARGS='-m exhaustive tests/server/test_terminal.py'`.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.local_ray import free_port
from tests.server.processes import kill, replicas, state_of, wait_until
from tests.server.running_server import ROOT, RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "TERM": "xterm", "COLUMNS": "120"}
# Of others than us: none of it belongs into a terminal.
CHATTER = ("(ServeReplica", "(raylet", "(autoscaler", "UCX", "NIXL", "Traceback", "\x1b", "ServeController")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster.serving.command_line", *arguments]


class Stream:
    """A streamed completion, in a thread of its own. has_begun: its first token has come."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self._url, self._num_tokens = url, num_tokens
        self.has_begun = threading.Event()
        self.lines: list[str] = []

    def read(self) -> list[str]:
        """All of it, to its end or to where it is cut."""
        body = {"prompt": "a b c", "max_tokens": self._num_tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=300) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.has_begun.set()
        except httpx.TransportError:
            pass
        return self.lines


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server("local-2p2d.yaml", tmp_path_factory.mktemp("terminal"), {"ingress.replicas": 1}) as server:
        yield server


def shown(server: RunningServer) -> str:
    return server.log_file.read_text()


def shows(server: RunningServer, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, shown(server)) is not None, 120.0)


def test_a_start_in_a_pipe(server: RunningServer) -> None:
    text = shown(server)
    assert f"splitserve: log of Ray and replicas: {server.replica_log}\n" in text
    assert re.search(r"^splitserve: starting Ray \(\d+\.\d s\)$", text, re.MULTILINE)
    for pool, number in (("ingress", 1), ("prefill", 2), ("decode", 2)):
        assert len(re.findall(rf"^splitserve: {pool} \d+: ready \(", text, re.MULTILINE)) == number
    assert "Ctrl-C stops it when open requests are over; Ctrl-C again stops it at once" in text
    assert [word for word in CHATTER if word in text] == []
    assert "NIXL agent" in server.replica_log.read_text()


def test_requests_and_throughput(server: RunningServer) -> None:
    typed = "What is the capital of France?\n/exit\n"
    done = subprocess.run(
        command("chat", server.url, "--max-tokens", "8"), input=typed, capture_output=True, text=True, env=ENVIRONMENT,
        cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\n\(\d+ tokens?, first after \d+\.\d\d s", done.stdout)  # what it says is drawn by lot
    shows(
        server, r"INFO ingress \d+: POST /v1/chat/completions 200 tokens_in=\d+ tokens_out=8 ttft_s=[\d.]+ duration_s="
    )
    shows(server, r"INFO ingress \d+: \d running, 0 waiting; prompts \d+ tok/s, generated [\d.]+ tok/s; KV cache \d+%")
    assert "capital of" not in server.log()


def test_a_killed_replica(server: RunningServer) -> None:
    before = replicas(server, "decode")
    streams = [Stream(server.url, 150) for _ in range(4)]
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(stream.read) for stream in streams]
        assert all(stream.has_begun.wait(120) for stream in streams)
        kill(before[0])
        assert all(future.result(200)[-1] == "data: [DONE]" for future in running)
    shows(server, r"WARNING ingress \d+: replica lost replica=\w+ why=dead")
    shows(server, r"INFO ingress \d+: decode replica \w+ has gone, 1 left")
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    (new,) = set(replicas(server, "decode")) - set(before)
    shows(server, rf"INFO decode {new}: ready after \d+\.\d s")
    assert [word for word in CHATTER if word in shown(server)] == []


def test_ctrl_c_while_the_ingress_does_not_answer(server: RunningServer) -> None:
    """The last test: the server is gone then. As on a starved machine, its stream is not taken for over."""
    stream = Stream(server.url, 200)
    (ingress,) = replicas(server, "ingress")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream.read)
        assert stream.has_begun.wait(120)
        os.kill(ingress, signal.SIGSTOP)
        try:
            wait_until(lambda: state_of(ingress) == "T", 120.0)
            server.process.send_signal(signal.SIGINT)
            shows(server, "an ingress does not answer, so requests may be open; waiting up to")
        finally:
            os.kill(ingress, signal.SIGCONT)
        assert running.result(200)[-1] == "data: [DONE]"
    assert server.process.wait(120) == 0
    assert shown(server).endswith("splitserve: stopped\n")
    assert "are cut" not in shown(server)


# -- in a terminal ---------------------------------------------------------------------------------


class InTerminal:
    """`splitserve serve` in a pseudo-terminal of its own."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        config = yaml.safe_load((ROOT / "configs/colocated.yaml").read_text())
        config |= {"logging": {"file": str(folder / "replicas.log")}, **changes}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        port = free_port()
        self.url, self.shown = f"http://127.0.0.1:{port}", ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, command("serve", str(path), "--port", str(port)), ENVIRONMENT)

    def until(self, text: str, timeout_s: float = 240.0) -> None:
        """Until the terminal has shown this."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline_s, self.shown[-3000:]
            assert self._read(), self.shown[-3000:]

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def end(self) -> int:
        """Its exit code."""
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], 1.0)[0]:
            return True
        try:
            piece = os.read(self._terminal, 65_536)
        except OSError:  # so a terminal's other end is closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)


def test_ctrl_c_twice_ends_it_at_once(tmp_path: Path) -> None:
    server = InTerminal(tmp_path, {})
    server.until("Ctrl-C again stops it at once")
    assert re.search(r"✓ .*decode \d+: ready", server.shown)
    stream = Stream(server.url, 1500)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream.read)
        assert stream.has_begun.wait(120)
        server.press_ctrl_c()
        server.until("1 request is not over; waiting up to")
        server.press_ctrl_c()
        assert server.end() == 130
        assert running.result(120)[-1] != "data: [DONE]"
    assert "stopped at once: requests that were not over are cut" in server.shown
    assert "Traceback" not in server.shown


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    server = InTerminal(tmp_path, {})
    server.until("starting replicas")
    server.press_ctrl_c()
    assert server.end() == 0
    assert "splitserve: stopped" in server.shown
    assert "Traceback" not in server.shown


def test_a_start_that_fails_names_the_cause_and_the_file(tmp_path: Path) -> None:
    """One that no look at the files before it foresees: the tokenizer is none."""
    folder = tmp_path / "model"
    folder.mkdir()
    size = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096, **size}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    model = {"source": str(folder), "max_model_len": 512, "load_format": "dummy"}
    server = InTerminal(tmp_path, {"model": model})
    assert server.end() == 1
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", server.shown.replace("\r", "")).split("\n")
    cause, where = [line for line in lines if line][-2:]
    assert cause == "the application did not start: ingress: KeyError: 'added_tokens'"
    assert where == f"The log has more: {tmp_path / 'replicas.log'}"
    assert "Traceback" not in server.shown
    assert "Traceback" in (tmp_path / "replicas.log").read_text()
