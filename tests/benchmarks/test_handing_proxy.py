"""vLLM's own 1P1D, with two servers in its place that do as it does: each request goes to one, then to the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from benchmarks.gpu.campaign_servers import ServedPiece, running
from benchmarks.gpu.handing_proxy import decode_body, prefill_body
from tests.benchmarks.fake_vllm import place_of

# Keeps what it is told to keep, but of the prompt [1]; refuses [0]; tells who it is in what it generates.
_LIKE_VLLM = """
import argparse, json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import nixl_cu13
class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer("text/plain", b"ok")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [0]:
            return self.answer("application/json", b'{"error": "no such prompt"}', 400)
        where = body.get("kv_transfer_params") or {}
        port = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        if where.get("do_remote_decode"):
            kept = {"do_remote_prefill": True, "remote_port": port, "asked": body}
            kept = None if body["prompt"] == [1] else kept
            return self.answer("application/json", json.dumps({"kv_transfer_params": kept}).encode())
        if body["prompt"] == [2]:  # it dies in the middle
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"data: {}\\n\\n")
            self.wfile.flush()
            os._exit(1)
        told = {"body": body, "own_port": port, "flags": options.flags, "card": os.environ["CUDA_VISIBLE_DEVICES"]}
        self.answer("text/event-stream", f"data: {json.dumps(told)}\\n\\ndata: [DONE]\\n\\n".encode())
    def answer(self, kind, text, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, flags = parser.parse_known_args()
options.flags = flags
try:
    ThreadingHTTPServer(("127.0.0.1", options.port), Answer).serve_forever()
except KeyboardInterrupt:
    pass
"""
BODY = {"model": "shape", "prompt": [5, 6, 7], "max_tokens": 9, "stream": True, "ignore_eos": True, "temperature": 0.0}
BODY |= {"stream_options": {"include_usage": True}}


@contextmanager
def handing_pair(folder: Path) -> Iterator[str]:
    piece = ServedPiece("pair-vllm-split", None, 60.0, (), num_cards=2, hands_over=True)
    with running(piece, place_of(folder, _LIKE_VLLM)) as url:
        yield url


def ask(url: str, body: dict[str, Any]) -> str:
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        text: str = response.read().decode()
    return text


def test_the_first_keeps_and_the_second_generates(tmp_path: Path) -> None:
    with handing_pair(tmp_path) as url:
        said = ask(url, BODY)
        first, last = said.strip().split("\n\n")
        assert last == "data: [DONE]"
        told = json.loads(first.removeprefix("data: "))
        where = told["body"].pop("kv_transfer_params")
        assert told["body"] == BODY
        assert told["card"] == "1"
        assert where["do_remote_prefill"]
        assert where["remote_port"] != told["own_port"], "each has its own side channel"
        assert where["asked"]["max_tokens"] == 1
        assert not where["asked"]["stream"]
        assert json.loads(told["flags"][told["flags"].index("--kv-transfer-config") + 1]) == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }
        for prompt, status, text in (([0], 400, "no such prompt"), ([1], 502, "nothing was kept to hand over")):
            with pytest.raises(HTTPError) as refused:
                ask(url, BODY | {"prompt": prompt})
            assert refused.value.code == status
            assert text in refused.value.read().decode()


def test_an_answer_that_is_cut_short_is_none_and_afterwards_requests_fail(tmp_path: Path) -> None:
    """The second server dies in the middle of it: a client must not take what it has for the whole."""
    with handing_pair(tmp_path) as url:
        with pytest.raises(IncompleteRead) as cut:
            ask(url, BODY | {"prompt": [2]})
        assert cut.value.partial == b"data: {}\n\n"
        with pytest.raises(HTTPError) as refused:
            ask(url, BODY)
        assert refused.value.code == 500


def test_what_each_of_the_two_is_asked() -> None:
    asked = prefill_body(BODY | {"min_tokens": 3})
    assert "min_tokens" not in asked
    assert "stream_options" not in asked
    assert (asked["prompt"], asked["ignore_eos"], asked["max_tokens"], asked["stream"]) == ([5, 6, 7], True, 1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"]
    where = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
    assert decode_body(BODY, {"kv_transfer_params": where}) == BODY | {"kv_transfer_params": where}
    for answer in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"do_remote_prefill": False}}):
        with pytest.raises(ValueError, match="nothing was kept"):
            decode_body(BODY, answer)
