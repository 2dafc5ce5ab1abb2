"""Real servers that draft by a model and by a head: golden texts, what is counted and billed; a decode replica that is
killed under streams; a draft folder that has gone when a replica starts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.golden.golden_set import Golden, load_goldens
from tests.model_folder import model_folder
from tests.replicas.eagle3_reference import config_of, random_tensors, save_eagle
from tests.server.generate import Completed, golden_request, post, stream
from tests.server.processes import is_ready, kill, replicas, wait_until
from tests.server.running_server import RunningServer, run_server

GOLDENS = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 60][:6]
NUM_TOKENS = 32
PATIENCE_S = 300.0
SCHEMA = {
    "type": "object",
    "properties": {"name_of_the_city": {"type": "string", "maxLength": 12}, "is_large": {"type": "boolean"}},
    "required": ["name_of_the_city", "is_large"],
    "additionalProperties": False,
}
CHANGES = {
    "model.max_model_len": 1024,
    "ingress.replicas": 1,
    "pools.prefill.replicas": 1,
    "pools.prefill.kv_capacity_tokens": 2048,
    "pools.decode.kv_capacity_tokens": 4096,
}

# Two servers, of four replicas each; about five minutes.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1500)]


def draft_folder(folder: Path) -> Path:
    """The bundled model as its own draft: links, which may go."""
    folder.mkdir()
    for file in Path(model_folder()).iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def head_folder(folder: Path) -> Path:
    """Of the bundled model's shape, and right about nothing."""
    config = config_of(576, 9, 3, vocab_size=49_152, draft_vocab_size=512)
    save_eagle(folder, config, random_tensors(config, has_own_embeddings=False))
    return folder


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(method: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp(method)
    made = draft_folder(folder / "draft") if method == "draft_model" else head_folder(folder / "draft")
    changes = {**CHANGES, "speculative.method": method, "speculative.model": str(made)}
    with run_server("local-2p2d.yaml", folder, changes) as server:
        yield server


def check(golden: Golden, answer: Completed) -> None:
    """Of the golden's beginning."""
    replace(golden, output_ids=golden.output_ids[:NUM_TOKENS]).check(answer.token_ids)
    assert (len(answer.token_ids), answer.finish_reason) == (NUM_TOKENS, "length")


def drafted(server: RunningServer) -> tuple[float, float]:
    """Drafted, and accepted, by one scrape."""
    counts = dict.fromkeys(("drafted", "accepted"), 0.0)
    for name, labels, value in server.metrics():
        what = name.removeprefix("splitserve_speculative_").removesuffix("_tokens_total")
        if what in counts and labels["pool"] == "decode":
            counts[what] += value
    return counts["drafted"], counts["accepted"]


def is_everybody_busy(server: RunningServer) -> bool:
    """Whether each decode replica has a request."""
    name = "splitserve_requests_in_flight"
    in_flight = [value for found, labels, value in server.metrics() if found == name and labels["pool"] == "decode"]
    return len(in_flight) == 2 and min(in_flight) > 0


def test_texts_metrics_and_usage(server: RunningServer, method: str) -> None:
    with server.client() as client:
        for golden in GOLDENS:
            path, body = golden_request(golden, NUM_TOKENS)
            check(golden, post(client, path, body)[0])
            check(golden, stream(client, path, body)[0])
        num_drafted, num_accepted = drafted(server)
        assert num_drafted >= num_accepted
        assert num_drafted > 0, "each engine tries it, and learns whether it pays"
        # Of equal weights, but for near ties, and for drafts that nobody waits for at an end.
        assert num_accepted > 0.7 * num_drafted or method == "eagle3"
        for golden in GOLDENS[:2]:
            path, body = golden_request(golden, NUM_TOKENS)
            answer = client.post(path, json={**body, "prediction": {"type": "content", "content": golden.text}}).json()
            usage = answer["usage"]
            assert usage["completion_tokens"] == NUM_TOKENS == len(answer["choices"][0]["token_ids"])
            details = usage["completion_tokens_details"]
            assert 0 <= details["accepted_prediction_tokens"] < NUM_TOKENS
            assert details["rejected_prediction_tokens"] >= 0
    assert server.total("splitserve_speculative_failed_drafters_total") == 0
    server.wait_for_baseline()


def test_answers_that_follow_a_schema(server: RunningServer) -> None:
    """What it forces is drafted."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    message = {"role": "user", "content": "Tell me about the city of Paris."}
    body = {"messages": [message], "temperature": 0, "max_tokens": 120, "response_format": form}
    before = drafted(server)
    texts = set()
    with server.client() as client:
        for _ in range(6):
            choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            texts.add(choice["message"]["content"])
    (text,) = texts
    jsonschema.validate(json.loads(text), SCHEMA)
    num_drafted, num_held = (now - then for now, then in zip(drafted(server), before, strict=True))
    assert num_drafted == num_held > 0


def streams(server: RunningServer, pool: ThreadPoolExecutor, client: Any) -> list[tuple[Golden, Future[Any]]]:
    """That have all begun."""
    name = "splitserve_time_to_first_token_seconds_count"
    before = server.total(name)
    running = [(golden, pool.submit(stream, client, *golden_request(golden, NUM_TOKENS))) for golden in GOLDENS]
    wait_until(lambda: server.total(name) >= before + len(GOLDENS), PATIENCE_S)
    return running


def test_a_decode_replica_that_is_killed_under_streams(server: RunningServer) -> None:
    """Each goes on at the other one, with drafts of its own, to the same text."""
    before = replicas(server, "decode")
    assert len(before) == 2
    lost = server.total("splitserve_replica_losses_total", reason="dead")
    with server.client() as client, ThreadPoolExecutor(len(GOLDENS)) as pool:
        running = streams(server, pool, client)
        wait_until(lambda: is_everybody_busy(server), PATIENCE_S)
        kill(before[0])
        for golden, future in running:
            check(golden, future.result(PATIENCE_S)[0])
        wait_until(lambda: server.total("splitserve_replica_losses_total", reason="dead") > lost, PATIENCE_S)
        wait_until(lambda: len(set(replicas(server, "decode")) - {before[0]}) == 2, PATIENCE_S)
        wait_until(lambda: is_ready(server), PATIENCE_S)
        for golden, future in streams(server, pool, client):
            check(golden, future.result(PATIENCE_S)[0])
    server.wait_for_baseline()


def test_a_draft_folder_that_has_gone_when_a_replica_starts_again(server: RunningServer, method: str) -> None:
    """Who runs needs it no more; who starts says which key's it is; when it is back so is the replica."""
    folder = server.log_file.parent / "draft"
    away = folder.rename(folder.with_name("away"))
    before = replicas(server, "decode")
    kill(before[0])
    said = f"speculative.model: {folder} is not there any more"
    wait_until(lambda: said in server.log(), PATIENCE_S)
    with server.client() as client:
        for golden in GOLDENS[:2]:
            check(golden, stream(client, *golden_request(golden, NUM_TOKENS))[0])
    away.rename(folder)
    wait_until(lambda: len(set(replicas(server, "decode")) - {before[0]}) == 2 and is_ready(server), PATIENCE_S)
    with server.client() as client:
        for golden in GOLDENS:
            check(golden, stream(client, *golden_request(golden, NUM_TOKENS))[0])
