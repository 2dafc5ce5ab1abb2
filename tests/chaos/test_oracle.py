"""What `make chaos` judges by: it sees each way in which a stream can fail, tells right texts from wrong ones, and
takes no fault for one that did not happen.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from tests.chaos import faults
from tests.chaos.asked import Asked, all_asked, some_asked
from tests.chaos.chaos_client import Choice, Stream, read_stream
from tests.chaos.growth import Growth, Held
from tests.chaos.judge import Judge, Undisturbed
from tests.chaos.rows import ROWS
from tests.chaos.soak import Faults, Happened
from tests.server.processes import cpu_ticks, state_of

ASKED = Asked("two", "choices", "/v1/completions", {"prompt": "a", "n": 2})
SERVER: Any = None  # what names no process needs no server


# -- what a client sees ----------------------------------------------------------------------------


def piece(index: int, ids: list[int], reason: str | None = None) -> bytes:
    choice = {"index": index, "text": "x" * len(ids), "token_ids": ids, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


WHOLE = piece(0, [1, 2]) + piece(1, [3], "stop") + piece(0, [4], "length")
DONE = b"data: [DONE]\n\n"
LOST = b'data: {"error": {"code": "ingress_lost"}}\n\n'
# Body, whether the connection is cut behind it, and how the client must take it.
ENDINGS = {
    "whole": (WHOLE + DONE, False, None),
    "without [DONE]": (WHOLE, False, "ended without [DONE]"),
    "a choice is missing": (piece(0, [1], "stop") + DONE, False, "[DONE] before the end"),
    "a choice has no end": (piece(0, [1], "stop") + piece(1, [1]) + DONE, False, "[DONE] before the end"),
    "an error event": (piece(0, [1]) + LOST, False, "error event ingress_lost"),
    "cut": (piece(0, [1]), True, "connection cut"),
    "cut at once": (b"", True, "connection cut before the first token"),
}


class Handler(BaseHTTPRequestHandler):
    body: ClassVar[bytes] = b""
    is_cut: ClassVar[bool] = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if self.path == "/503" else 200)
        self.send_header("Content-Length", str(len(self.body) + self.is_cut))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_stream_ends(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, is_cut, error = ENDINGS[name]
    monkeypatch.setattr(Handler, "body", body)
    monkeypatch.setattr(Handler, "is_cut", is_cut)
    stream = read_stream(url, ASKED)
    assert (stream.error, stream.is_whole) == (error, error is None)
    if error is None:
        assert stream.choices == {0: Choice([1, 2, 4], "xxx", "length"), 1: Choice([3], "x", "stop")}


def test_a_status_is_told_with_its_code_and_nobody_there_is_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "body", b'{"error": {"code": "no_capacity"}}')
    assert read_stream(url, replace(ASKED, path="/503")).error == "status 503 no_capacity"
    monkeypatch.setattr(Handler, "body", b"Internal Server Error")
    assert read_stream(url, replace(ASKED, path="/503")).error == "status 503 without an envelope"
    assert read_stream("http://127.0.0.1:9", ASKED).error == "connection refused"


def test_a_client_that_leaves_has_not_failed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "body", WHOLE + DONE)
    stream = read_stream(url, ASKED, leaves_after=1)
    assert (stream.error, stream.has_left, stream.is_whole) == (None, True, False)
    assert stream.choices == {0: Choice([1, 2], "xx")}


# -- which texts are right -------------------------------------------------------------------------


class NoTies(Judge):
    def _is_near_tie(self, asked: Asked, index: int, ids: list[int]) -> bool:
        return ids[-1:] == [77]


RIGHT = {0: Choice([1, 2, 3], "abc", "length")}
VERDICTS: list[tuple[Choice, str]] = [
    (Choice([1, 2, 3], "abc", "length"), "right"),
    (Choice([1, 2], "ab"), "right"),
    (Choice([1, 2], "a"), "right"),  # what may become a stop string is held back
    (Choice([], ""), "right"),
    (Choice([1, 2, 3], "abc", "stop"), "wrong"),
    (Choice([1, 2], "ab", "length"), "wrong"),
    (Choice([1, 3], "ac"), "wrong"),
    (Choice([1, 2], "ax"), "wrong"),
    (Choice([1, 2, 2, 3], "abbc"), "wrong"),
    (Choice([1, 77], "a?"), "near tie"),
]


@pytest.mark.parametrize(("got", "verdict"), VERDICTS)
def test_verdicts(got: Choice, verdict: str) -> None:
    judge = NoTies(Undisturbed({"two": RIGHT}))
    assert judge.verdict(Stream(ASKED, 0.0, choices={0: got})) == verdict


def test_the_load_is_what_is_promised() -> None:
    kinds = [asked.kind for asked in all_asked()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"greedy": 16, "seeded": 8, "choices": 4, "schema": 4}
    assert len({asked.name for asked in all_asked()}) == 32
    assert {asked.kind for asked in some_asked(6)} == set(kinds)


# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Stands for a replica: it does something all the time."""
    process = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.001)"])
    monkeypatch.setattr(faults, "victims", lambda server, name: [process.pid])
    yield process
    process.kill()
    process.wait()


def test_a_killed_one_is_gone(child: subprocess.Popen[bytes]) -> None:
    assert "gone" in faults.killed("decode")(SERVER).evidence
    assert child.wait(120) == -signal.SIGKILL


def test_a_frozen_one_has_stood_still_and_goes_on(child: subprocess.Popen[bytes]) -> None:
    injected = faults.frozen("decode", 0.5)(SERVER)
    assert injected.evidence == f"pid {child.pid} in state T for 0.5 s"
    assert state_of(child.pid) in ("R", "S", "D")


def test_one_that_somebody_wakes_has_not_stood_still(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(pid: int) -> int:
        os.kill(pid, signal.SIGCONT)
        return cpu_ticks(pid)

    monkeypatch.setattr(faults, "cpu_ticks", look)
    with pytest.raises(AssertionError, match="stood still"):
        faults.frozen("decode", 0.2)(SERVER)


def test_what_is_not_there_can_not_be_killed(child: subprocess.Popen[bytes]) -> None:
    with pytest.raises(AssertionError, match="only 1 processes"):
        faults.killed("decode", 2)(SERVER)


# -- the soak --------------------------------------------------------------------------------------


def grown(amounts: list[float], what: str, num: int = 2) -> list[str]:
    samples = [(float(at), {"decode": Held("decode", num, {what: amount})}) for at, amount in enumerate(amounts)]
    return Growth(samples).lines({"decode": 2})[1]


def test_what_grows_is_told_and_what_moves_is_not() -> None:
    assert grown([900.0 + 30 * (at % 3) for at in range(40)], "MiB") == []
    assert grown([900.0 + 10 * at for at in range(40)], "MiB") == ["decode: 945 -> 1245 MiB"]
    assert grown([200.0 + at for at in range(80)], "files") == ["decode: 210 -> 270 files"]
    assert grown([50.0] * 4, "threads", num=1) == ["decode: hardly ever all were there"], "half of them say nothing"


def test_an_error_is_allowed_while_its_fault_is_felt_and_only_its_own() -> None:
    cut = Happened(ROWS["kill proxy"], 100.0, 110.0, "")
    soak = Faults(SERVER, 30.0, random.Random(1), [cut, Happened(ROWS["kill decode"], 200.0, 210.0, "")])
    assert soak.allow("connection cut", 95.0, 101.0)
    assert soak.allow("connection refused", 105.0, 105.1)
    assert not soak.allow("connection cut", 95.0, 99.0), "it had failed before"
    assert not soak.allow("connection cut", 150.0, 160.0), "long after"
    assert not soak.allow("error event internal_error", 95.0, 101.0)
    assert not soak.allow("connection cut", 195.0, 205.0), "a decode replica's death cuts nobody"
