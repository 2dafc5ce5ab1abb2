"""Clients whose answers are typed: each asks in its own way for text that follows a schema. Also needs

    npm install --prefix .clients-npm ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7

CLIENTS_NPM names another folder. OpenAI's own client is in tests/server/test_structured_outputs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_clients import API_KEY, drive
from tests.server.running_server import ROOT, RunningServer, run_server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("typed_clients")
    keys = folder / "keys.txt"
    keys.write_text(f"{API_KEY}\n")
    with run_server("local.yaml", folder, {"auth.api_keys_file": str(keys), "model.max_model_len": 1024}) as server:
        yield server
        server.wait_for_baseline()


def is_capital(found: Any, *more: str) -> bool:
    return (
        found.keys() == {"name", "kind", "inhabitants", *more}
        and len(found["name"]) <= 20
        and found["kind"] in ("city", "town")
        and 0 <= found["inhabitants"] <= 99_999_999
    )


def test_instructor(server: RunningServer) -> None:
    got = drive("drive_instructor.py", server.url, API_KEY)
    assert is_capital(got["JSON_SCHEMA"], "nickname")
    assert got["streamed"] == got["JSON_SCHEMA"]
    assert got["JSON"]  # JSON in any case, and of the schema as far as the model does what it is told


def test_vercels_ai(server: RunningServer) -> None:
    folder = Path(os.environ.get("CLIENTS_NPM", ROOT / ".clients-npm"))
    assert folder.exists(), f"{folder} is missing: see the first lines of {__file__}"
    done = subprocess.run(
        ["node", "tests/clients/drive_ai.mjs", server.url, API_KEY, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.strip().splitlines()[-1])
    assert is_capital(got["whole"], "tags")
    assert got["finishReason"] == "stop"
    assert got["streamed"] == got["whole"]
    assert got["numParts"] > 1
    assert got["choice"] in ("city", "town")
