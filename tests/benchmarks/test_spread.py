"""Requests to one port reach all servers behind it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.gpu.campaign_servers import ServedPiece, running
from benchmarks.gpu.spread import spread
from benchmarks.gpu.vllm_servers import visible_card
from tests.benchmarks.fake_vllm import place_of

# Listens where another one does, as vLLM's server.
_LIKE_VLLM = """
import argparse, os, socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
class Server(ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
try:
    Server(("127.0.0.1", options.port), Answer).serve_forever()
except KeyboardInterrupt:
    pass
"""


def server(name: str) -> ThreadingHTTPServer:
    class Named(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *args: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Named)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def test_requests_reach_every_server(tmp_path: Path) -> None:
    servers = [server("a"), server("b")]
    try:
        urls = [f"http://127.0.0.1:{made.server_port}" for made in servers]
        with spread(urls, tmp_path) as url:
            answers = {urlopen(f"{url}/health", timeout=120).read().decode() for _ in range(8)}
        assert answers == {"a", "b"}
    finally:
        for made in servers:
            made.shutdown()
            made.server_close()


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="503"), spread(["http://127.0.0.1:1"], tmp_path):
        pass


def test_a_card_is_one_of_those_that_this_process_sees() -> None:
    assert visible_card(1, {}) == "1"
    assert [visible_card(number, {"CUDA_VISIBLE_DEVICES": "2,3"}) for number in (0, 1)] == ["2", "3"]


def test_vllm_has_a_server_for_each_card_and_requests_reach_both(tmp_path: Path) -> None:
    with running(ServedPiece("pair-vllm", None, 60.0, (), num_cards=2), place_of(tmp_path, _LIKE_VLLM)) as url:
        answers = {urlopen(f"{url}/health", timeout=120).read() for _ in range(8)}
    assert len(answers) == 2
