"""Every layout gives the same tokens as transformers' generate, and the same draws as every other layout."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.golden.golden_set import Golden, load_goldens, load_sampled_requests
from tests.server.conftest import OneServer
from tests.server.generate import Completed, golden_request, post_all, stream_events
from tests.server.running_server import RunningServer

GOLDENS = load_goldens()
LAYOUTS = {"1p1d": "local.yaml", "2p2d": "local-2p2d.yaml", "colocated": "colocated.yaml"}
# What 1P1D does, 2P2D does too; and the other files of this folder serve it.
LONG = {"1p1d": [pytest.mark.exhaustive]}


@pytest.fixture(scope="module", params=[pytest.param(name, id=name, marks=LONG.get(name, [])) for name in LAYOUTS])
def server(request: pytest.FixtureRequest, one_server: OneServer) -> RunningServer:
    return one_server.get(request.param, LAYOUTS[request.param])


@pytest.fixture(scope="module")
def draws() -> dict[str, list[list[Completed]]]:
    """Sampled outputs by layout, in the order in which the layouts ran."""
    return DRAWS


DRAWS: dict[str, list[list[Completed]]] = {}


def _check(goldens: list[Golden], answers: list[list[Completed]]) -> None:
    ties = []
    for golden, (answer,) in zip(goldens, answers, strict=True):
        tie = golden.check(answer.token_ids)
        if tie is not None:
            ties.append(f"{golden.name} at {tie.index}")
        else:
            assert answer.text == golden.text, golden.name
        assert answer.finish_reason == "length"
    print(f"{len(goldens)} prompts compared, near ties: {ties or 'none'}")


@pytest.mark.timeout(900)
def test_sixteen_at_a_time_equal_transformers(server: RunningServer, request: pytest.FixtureRequest) -> None:
    # A part of them, the larger in one layout: `make test` is to stay under 15 minutes. All: see the exhaustive one.
    goldens = GOLDENS[:: 8 if request.node.callspec.params["server"] == "colocated" else 4]
    _check(goldens, post_all(server, [golden_request(golden) for golden in goldens], num_at_once=16))
    server.wait_for_baseline()


@pytest.mark.timeout(900)
def test_alone_equals_transformers(server: RunningServer) -> None:
    goldens = GOLDENS[::37]
    _check(goldens, post_all(server, [golden_request(golden) for golden in goldens], num_at_once=1))


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("num_at_once", [1, 16])
def test_every_prompt_equals_transformers(server: RunningServer, num_at_once: int) -> None:
    _check(GOLDENS, post_all(server, [golden_request(golden) for golden in GOLDENS], num_at_once))


@pytest.mark.timeout(600)
def test_streamed_equals_whole(server: RunningServer) -> None:
    goldens = random.Random(5).sample(GOLDENS, 3)
    _check(goldens, post_all(server, [golden_request(golden) for golden in goldens], num_at_once=8, streamed=True))


@pytest.mark.timeout(600)
def test_sampled_requests_are_the_same_in_every_layout(
    server: RunningServer, request: pytest.FixtureRequest, draws: dict[str, list[list[Completed]]]
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []
    for sampled in load_sampled_requests():
        fields = {key: value for key, value in sampled.items() if key != "name"}
        requests.append(("/v1/completions", {**fields, "return_token_ids": True}))
    layout = request.node.callspec.params["server"]
    draws[layout] = post_all(server, requests, num_at_once=16)
    first, *others = draws
    for other in others:
        assert draws[other] == draws[first], f"{other} draws differently from {first}"
    for sampled, answer in zip(load_sampled_requests(), draws[layout], strict=True):
        assert len(answer) == sampled["n"]
        assert len({tuple(choice.token_ids) for choice in answer}) == sampled["n"]


def test_paris(server: RunningServer) -> None:
    body = {"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 32}).json()
        events = stream_events(client, "/v1/chat/completions", {**body, "max_tokens": 32})
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed == answer["choices"][0]["message"]["content"]


def test_the_openai_client_streams(server: RunningServer) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        (model,) = client.models.list()
        chunks = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        received = list(chunks)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices)
    assert received[-1].usage is not None
    assert received[-1].usage.completion_tokens == 8


def test_metrics_are_the_same_whichever_ingress_answers(server: RunningServer, request: pytest.FixtureRequest) -> None:
    layout = request.node.callspec.params["server"]
    server.wait_for_baseline()
    bytes_before = server.total("splitserve_kv_transfer_bytes_total")
    ready_before = server.total("splitserve_kv_transfers_total", result="ready")
    lengths = (5, 16, 17, 40)
    body = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    for first_id in (2000, 2010):  # no two of them begin alike: all of each is moved
        prompts = [[first_id + number] * length for number, length in enumerate(lengths)]
        bodies = [("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
        # By themselves: behind a longer prompt decode would compute a short one (routing.local_by_cost).
        post_all(server, bodies, num_at_once=1)
    server.wait_for_baseline()
    num_blocks = 2 * (1 + 1 + 2 + 3) if layout != "colocated" else 0
    block_bytes = 46_080 * 16
    totals = [server.total("splitserve_kv_transfer_bytes_total") for _ in range(6)]
    assert totals == [bytes_before + num_blocks * block_bytes] * 6
    moved = server.total("splitserve_kv_transfers_total", result="ready") - ready_before
    assert moved == (2 * len(lengths) if layout != "colocated" else 0)
    replicas = {labels["replica"] for _, labels, _ in server.metrics()}
    assert len(replicas) == {"1p1d": 3, "2p2d": 6, "colocated": 2}[layout]


def test_bad_requests_get_an_envelope(server: RunningServer) -> None:
    with server.client() as client:
        for body, status, param in [
            ({"prompt": "hi", "max_tokens": 0}, 400, "max_tokens"),
            ({"prompt": "hi", "temperature": 3, "stream": True}, 400, "temperature"),
            ({"prompt": [5279552648203111001]}, 400, "prompt"),
            ({"prompt": "hi", "model": "other"}, 404, "model"),
            ({"prompt": "hi " * 3000}, 400, "prompt"),
            ({"prompt": [1] * 2000, "max_tokens": 100}, 400, "max_tokens"),
        ]:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == status, (body, response.text)
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert error["param"] == param
            assert error["message"]
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        ready = client.get("/health/ready").json()
        assert ready.pop("slowest_transfer", {}).keys() in (set(), {"reader", "source", "gb_per_s"})
        assert ready == {"status": "ready"}
        assert client.get("/version").json()["version"]
