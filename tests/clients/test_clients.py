"""Other people's clients as they are. Not part of `make test`, as they need an environment of their own:

    python3.11 -m venv .clients-venv && .clients-venv/bin/pip install -r tests/clients/requirements.txt
    make test ARGS='-m clients tests/clients'

CLIENTS_VENV names another folder. OpenAI's own client is in tests/server/test_openai_client.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.answer_families import TEMPLATES
from tests.model_folder import model_folder
from tests.server.running_server import ROOT, RunningServer, run_server

API_KEY = "sk-test-0123456789"

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys.txt"
    keys.write_text(f"{API_KEY}\n")
    with run_server("local.yaml", folder, {"auth.api_keys_file": str(keys), "model.max_model_len": 512}) as server:
        yield server
        server.wait_for_baseline()


def drive(script: str, *arguments: str) -> Any:
    """What a script of this folder prints as its last line, run by the clients' Python."""
    python = Path(os.environ.get("CLIENTS_VENV", ROOT / ".clients-venv")) / "bin" / "python"
    assert python.exists(), f"{python} is missing: see the first lines of {__file__}"
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), f"tests/clients/{script}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_langchain(server: RunningServer) -> None:
    got = drive("drive_langchain.py", server.url, API_KEY)
    assert "Paris" in got["answer"]
    assert got["streamed"] == got["answer"] == got["batch"][0]
    assert got["usage"] == got["num_scored"] > 0
    assert got["completion"]
    assert got["responses"] == got["responses_streamed"] == got["answer"]


def test_litellm(server: RunningServer) -> None:
    got = drive("drive_litellm.py", server.url, API_KEY)
    assert "Paris" in got["answer"]
    assert got["streamed"] == got["answer"]
    assert got["usage"] > 0
    assert got["completion"]
    assert "messages must" in got["error"]


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same weights with a chat template that shows tools and takes their answers."""
    folder = tmp_path_factory.mktemp("tool_clients")
    model = folder / "SmolLM2-135M-Instruct"
    model.mkdir()
    for path in Path(model_folder()).iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    keys = folder / "keys.txt"
    keys.write_text(f"{API_KEY}\n")
    changes = {"auth.api_keys_file": str(keys), "model.max_model_len": 1024, "model.source": str(model)}
    with run_server("local.yaml", folder, changes) as server:
        yield server
        server.wait_for_baseline()


def test_langchains_agents_and_typed_answers(tool_server: RunningServer) -> None:
    got = drive("drive_langchain_tools.py", tool_server.url, API_KEY)
    name, arguments = got["call"]
    assert name == "get_weather"
    assert isinstance(arguments["city"], str)
    assert got["streamed"] == [got["call"]]
    assert got["finish_reason"] == "tool_calls"
    assert got["final"]
    assert got["agent"]
    for answer in (got["typed"], got["schema"]):
        assert answer.keys() == {"city", "inhabitants"}


def test_pydantic_ai(tool_server: RunningServer) -> None:
    got = drive("drive_pydantic_ai.py", tool_server.url, API_KEY)
    assert got["streamed"] == got["typed"]
    assert got["typed"].keys() == got["schema"].keys() == {"city", "inhabitants"}
    assert got["text"]


def test_openai_agents(server: RunningServer) -> None:
    got = drive("drive_openai_agents.py", server.url, API_KEY)
    assert "Paris" in got["answer"]
    assert got["streamed"] == got["deltas"] == got["answer"]
    assert got["second"]
    assert got["usage"] > 0
    assert got["called"] == ["sunny", "sunny"]
    assert len(got["asked"]) == 2
    assert got["asked"][0] == got["asked"][1]
    assert "response.function_call_arguments.delta" in got["kinds"]
    assert got["kinds"][-1] == "response.completed"
    assert got["judged"] == "bool"


def test_anthropics_client_is_told_what_to_use(server: RunningServer) -> None:
    errors = drive("drive_anthropic.py", server.url, API_KEY)
    assert len(errors) == 3
    for kind, message in errors:
        assert kind == "not_found_error"
        assert "/v1/chat/completions" in message


def test_lm_eval_gives_the_log_likelihoods_of_its_own_backend(server: RunningServer) -> None:
    got = drive("drive_lm_eval.py", server.url, API_KEY, str(model_folder()))
    assert len(got["server"]) == len(got["hf"]) == 24
    for (logprob, greedy), (expected, expected_greedy) in zip(got["server"], got["hf"], strict=True):
        assert logprob == pytest.approx(expected, abs=2e-3)
        assert greedy == expected_greedy
