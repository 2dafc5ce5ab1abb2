"""What the documents offer to ask a running server, read from there and asked of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.docs.command_blocks import DOCUMENTS, ROOT, blocks, commands
from tests.docs.command_table import Trial, row_of
from tests.server.conftest import OneServer
from tests.server.running_server import RunningServer

OFFERED_URL = "http://127.0.0.1:8000"
BLOCKS = [block for file in DOCUMENTS for block in blocks(file)]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
ASKED = [
    command
    for block in BLOCKS
    if block.language == "" and block.settings is None
    for command in commands(block)
    if (row := row_of(command)) and row.trial is Trial.SERVER
]
CURLS = [command.words for command in ASKED if command.words[0] == "curl"]
LOADS = [command.words for command in ASKED if command.words[0] == "python"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", CURLS, ids=lambda words: words[1])
def test_curl(words: tuple[str, ...], small_server: RunningServer) -> None:
    """With an HTTP client of Python's, since a machine need not have curl."""
    url = words[1].replace(OFFERED_URL, small_server.url)
    given = dict(zip(words[2::2], words[3::2], strict=True))
    if "-d" not in given:
        answer = httpx.get(url, timeout=120)
    else:
        name, value = given["-H"].split(": ")
        answer = httpx.post(url, content=given["-d"], headers={name: value}, timeout=300)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "messages" in given.get("-d", ""):
        assert "Paris" in body["choices"][0]["message"]["content"]
    elif "prediction" in given.get("-d", ""):
        assert body["choices"][0]["text"].strip()
    elif "prompt" in given.get("-d", ""):
        assert "Paris" in body["choices"][0]["text"]
    else:
        assert body["status"] == "ready"


def test_python(small_server: RunningServer) -> None:
    (program,) = PROGRAMS
    assert OFFERED_URL in program.text
    text = program.text.replace(OFFERED_URL, small_server.url)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", LOADS, ids=lambda words: " ".join(words[2:])[:60])
def test_load(words: tuple[str, ...], one_server: OneServer, tmp_path: Path) -> None:
    """Latencies are this machine's own; that every request succeeds is not."""
    url = one_server.get("documents", "local.yaml").url
    command = [sys.executable, *(word.replace(OFFERED_URL, url) for word in words[1:] if word != "run.json")]
    command = [word for word in command if word != "--output"]
    done = subprocess.run([*command, "--output", tmp_path / "run.json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "run.json").read_text())
    assert figures["completed"] == int(words[words.index("--num-requests") + 1])
