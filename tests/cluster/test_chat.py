"""`splitserve chat`: with a pipe and in a terminal; what it keeps, what it says of its speed and of errors."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.client.api_client import ApiClient, server_url
from cluster.client.chat import Chat
from cluster.serving.command_line import main
from cluster.user_error import UserError
from tests.cluster.chat_server import ChatServer, chat_server

ROOT = Path(__file__).parents[2]
SPEED = r"\({} tokens?, first after \d+\.\d\d s(, \d+\.\d tokens/s)?{}\)"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    """With this piped in."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", *arguments])


def test_a_conversation(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one two three\n\n  four\n/exit\nnever\n", server.url) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(f"three two one\n{SPEED.format(3, '')}\nfour\n{SPEED.format(1, '')}\n", out), out
    assert err == ""
    assert [body["model"] for body in server.bodies] == ["the-model", "the-model"]
    assert [message["content"] for message in server.bodies[1]["messages"]] == [
        "one two three",
        "three two one",
        "  four",
    ]
    assert all(body["stream"] for body in server.bodies)


def test_commands(server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\n/system You  are a pirate.\nb\nc\n/reset\nd\n/system\ne\n/help\n"
    options = ["--system", "Be brief.", "--max-tokens", "1", "--model", "m"]
    assert chat(monkeypatch, text, f"{server.url}/v1/", *options) == 0
    out, err = capsys.readouterr()
    assert out.count("(the conversation begins anew)") == 3
    assert len(re.findall(SPEED.format(1, ", cut at its limit"), out)) == 5
    assert err.startswith("unknown command /help: /reset forgets")
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]
    pirate = "You  are a pirate."
    assert said == [["Be brief.", "a"], [pirate, "b"], [pirate, "b", "b", "c"], [pirate, "d"], ["e"]]
    assert [body["max_tokens"] for body in server.bodies] == [1] * 5
    assert {body["model"] for body in server.bodies} == {"m"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("be full", "status 429: 8 requests are waiting"),
        ("fail now", "the answer broke off: the worker died"),
        ("break now", "the answer broke off: the connection was closed before its end"),
    ],
)
def test_an_error_is_one_line_and_the_conversation_goes_on_as_if_it_had_not_been_asked(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    assert chat(monkeypatch, f"{text}\nwell\n", server.url) == 1
    out, err = capsys.readouterr()
    assert err.endswith(f"{error}\n")
    assert err.count("\n") == 1
    assert out.splitlines()[-2] == "well"
    assert len(server.bodies[-1]["messages"]) == 1


def test_without_a_server_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server() as gone:
        pass
    assert chat(monkeypatch, "x\n", gone.url) == 1
    assert capsys.readouterr() == ("", f"{gone.url}: nobody listens there; is the server running, and ready?\n")


def test_what_is_no_such_server(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="names no model"):
        ApiClient(f"{server.url}/odd", {}).model()


def test_the_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(key="sk-secret") as server:
        monkeypatch.delenv("SPLITSERVE_API_KEY", raising=False)
        assert chat(monkeypatch, "x\n", server.url) == 1
        refused = capsys.readouterr().err
        assert refused.count("\n") == 1
        assert (
            "status 401: a key is needed (its API key goes into the environment variable SPLITSERVE_API_KEY)" in refused
        )
        monkeypatch.setenv("SPLITSERVE_API_KEY", "sk-secret")
        assert chat(monkeypatch, "x\n", server.url) == 0
        monkeypatch.delenv("SPLITSERVE_API_KEY")
        monkeypatch.setenv("OTHER_KEY", "sk-secret")
        assert chat(monkeypatch, "x\n", server.url, "--api-key-env", "OTHER_KEY") == 0
        assert "sk-secret" not in "".join(capsys.readouterr())


def test_speed_is_of_the_server_not_of_its_events(server: ChatServer) -> None:
    """Each look at the clock takes a second: asked, first text, second, third."""
    clock = iter(range(10, 100))
    said = Chat(ApiClient(server.url, {}), "m", None, lambda: float(next(clock))).ask("a b c", lambda _: None)
    assert (said.num_tokens, said.ttft_s, said.tokens_per_s) == (3, 1.0, 1.0)
    assert str(said) == "3 tokens, first after 1.00 s, 1.0 tokens/s"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:9000/v1/", "http://[::1]:9000"),
        ("https://host/base/v1", "https://host/base"),
        ("localhost:80", "http://localhost:80"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["", "http://", "ftp://host", "host:port", "http://host:99999999"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError, match="is no address of a server"):
        server_url(text)


def test_in_a_terminal_it_asks_and_ctrl_c_ends_it(server: ChatServer) -> None:
    ours, theirs = pty.openpty()

    def begin() -> None:
        """The terminal is the process's own, and Ctrl-C tells it, whatever this process makes of that signal: who is
        started inherits that it is ignored or held back."""
        os.close(os.open(os.ttyname(0), os.O_RDWR))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    command = [sys.executable, "-m", "cluster.serving.command_line", "chat", server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True,
        preexec_fn=begin,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline_s = time.monotonic() + 120.0
        while text not in shown:
            assert time.monotonic() < deadline_s, shown
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 4096)

    until(b"the-model at http://")
    until(b"> ")
    os.write(ours, b"one two\n")
    until(b"two one\r\n(2 tokens")
    shown = shown.split(b"(2 tokens", 1)[1]
    until(b"> ")  # it listens again
    # Once: a second one may come when the process is on its way out, and kill it. Of one that came before readline
    # listened Python makes an exception when the line ends.
    os.write(ours, b"\x03")
    deadline_s = time.monotonic() + 120.0
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.5)
        with suppress(OSError):
            os.write(ours, b"\n")
        if select.select([ours], [], [], 0.0)[0]:  # nobody shall wait for a terminal that is not read
            with suppress(OSError):
                shown += os.read(ours, 4096)
    assert process.poll() == 130, shown
    os.close(ours)
