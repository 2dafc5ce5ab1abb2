"""Inputs nobody asks for, against a running server: odd HTTP, odd texts, and random valid requests whose streamed and
whole answers must agree. Nothing may be answered with 5xx, hang, or harm the next request."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import API_KEY
from tests.server.generate import Completed, post, stream
from tests.server.running_server import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = f"Authorization: Bearer {API_KEY}\r\n"
JSON = f"Host: x\r\n{KEY}Content-Type: application/json\r\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=api_server.url, timeout=120, headers=headers) as client:
        yield client
        assert client.post(TEXT, json={"prompt": "The sun is", "max_tokens": 2}).status_code == 200
    api_server.wait_for_baseline()


GET, POST = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{KEY}", f"POST {TEXT} HTTP/1.1\r\n{JSON}"
UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
RAW = {
    "path that is no ASCII": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute address": GET.replace("/v1", "http://evil.example/v1").encode() + b"\r\n",
    "HEAD": b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown method": b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.0": POST.replace("1.1", "1.0").encode() + b"Content-Length: 2\r\n\r\n{}",
    "no version": b"GET /health\r\n\r\n",
    "length that is no number": POST.encode() + b"Content-Length: abc\r\n\r\n",
    "negative length": POST.encode() + b"Content-Length: -1\r\n\r\n",
    "length and chunks": POST.encode() + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk that is no number": POST.encode() + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "gzip": POST.encode() + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "a long header": f"{GET}X-Long: {'a' * 60_000}\r\n\r\n".encode(),
    "many headers": (GET + "X-A: b\r\n" * 500 + "\r\n").encode(),
    "a header that is no UTF-8": GET.encode() + b"User-Agent: \xff\xfe\r\n\r\n",
    "WebSocket": f"{GET}{UPGRADE}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode(),
    "two slashes": GET.replace("/v1", "//v1").encode() + b"\r\n",
    "a model's name with a zero": GET.replace("models", "models/%00%ff").encode() + b"\r\n",
    "expects to be told to go on": POST.encode() + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", RAW)
def test_odd_http_is_answered_or_closed(name: str, api_server: RunningServer, client: httpx.Client) -> None:
    host, port = api_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(RAW[name])
        answer = link.recv(65_536)
        if answer.startswith(b"HTTP/1.1 100"):
            answer = link.recv(65_536)
    if answer:
        assert 200 <= int(answer.split(b" ", 2)[1]) < 500, answer[:2000]


ODD_TEXTS = ["\0", "\0a", "\u202e", "\ue000", "\ue0001\ue0012\ue002", "\ufeff", "\uffff", "🌶", "ééé", " ", "\n"]
ODD_TEXTS += ["<|im_end|>", "<|im_start|>", "<|im", "{{ 7 * 7 }}", "{% for %}", "data: [DONE]\n\n", "a" * 700]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts(text: str, client: httpx.Client) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": text, "echo": True, "logprobs": 1}),
        (TEXT, {"prompt": ["x", text], "stop": [text[:200]]}),
        (TEXT, {"prompt": "x", "bad_words": [text[:200]]}),
        (CHAT, {"messages": [{"role": "user", "content": text, "name": text}], "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": text, text: "x"}}),
        ("/tokenize", {"prompt": text, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ]
    for path, body in bodies:
        body = body if path == "/tokenize" else {**body, "max_tokens": 2, "temperature": 0}
        response = client.post(path, json=body)
        assert response.status_code in (200, 400), (body, response.text)
        assert isinstance(response.json(), dict)
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    if "\0" not in text:  # this vocabulary lacks it
        assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def _random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One that is valid, or whose fields do not go together."""
    ids = [rng.randrange(49_152) for _ in range(rng.randrange(1, 30))]
    path = rng.choice([CHAT, TEXT])
    body: dict[str, Any] = {"seed": rng.randrange(-(2**63), 2**63), "max_tokens": rng.randrange(1, 9)}
    prompt = rng.choice(["Once upon a time", ids, "🌶 x", "1 2 3 4 5 6"])
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": prompt}
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": rng.randrange(21)}
    choices: list[dict[str, Any]] = [
        {"n": rng.randrange(1, 5)},
        {"temperature": rng.choice([0, 1e-6, 0.1, 1, 2])},
        {"top_p": rng.choice([1e-9, 0.1, 0.9, 1])},
        {"top_k": rng.choice([-1, 0, 1, 50, 2**31 - 1])},
        {"min_p": rng.choice([0, 0.1, 1])},
        {"repetition_penalty": rng.choice([1e-6, 0.5, 1.3, 1e9])},
        {"presence_penalty": rng.choice([-2, 2]), "frequency_penalty": rng.choice([-2, 2])},
        {"logit_bias": {str(rng.randrange(49_152)): rng.choice([-100, 100, 0.5]) for _ in range(rng.randrange(9))}},
        {"bad_words": rng.choice([[" the"], ["a", "e"], ["<|im_end|>"], [","]])},
        {"allowed_token_ids": [rng.randrange(49_152) for _ in range(rng.randrange(1, 50))]},
        {"min_tokens": rng.randrange(1, 9)},
        {"stop": rng.choice(["e", [" a", "\n"], ["the", "th", "h"]]), "include_stop_str_in_output": rng.random() < 0.5},
        {"stop_token_ids": [rng.randrange(100) for _ in range(5)]},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"truncate_prompt_tokens": rng.choice([-1, 1, 7])},
        logprobs if path == CHAT else {"logprobs": rng.randrange(6), "echo": rng.random() < 0.5},
        {"use_beam_search": True, "best_of": 4, "length_penalty": rng.choice([0, 2])},
    ]
    for fields in rng.sample(choices, rng.randrange(6)):
        body |= fields
    return path, body | {"return_token_ids": True}


def _compare(client: httpx.Client, rng: random.Random, num_requests: int) -> None:
    num_compared = 0
    for _ in range(num_requests):
        path, body = _random_request(rng)
        response = client.post(path, json=body)
        assert response.status_code in (200, 400), (body, response.text)
        if response.status_code == 400:
            # The whole answer may be refused when generation is under way; a stream says the same in an event.
            refused = client.post(path, json={**body, "stream": True})
            assert refused.status_code == 400 or '"nothing_allowed"' in refused.text, (body, refused.text)
            continue
        num_compared += 1
        whole: list[Completed] = post(client, path, body)
        assert stream(client, path, body) == whole, body
        assert all(choice.finish_reason in ("stop", "length") for choice in whole)
        assert all(len(choice.token_ids) <= body["max_tokens"] for choice in whole)
    assert num_compared > num_requests / 3


def test_streamed_and_whole_answers_agree(client: httpx.Client) -> None:
    _compare(client, random.Random(1), 12)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, pytest.param(None, id="random")])
def test_streamed_and_whole_answers_agree_on_many(client: httpx.Client, seed: int | None) -> None:
    chosen = random.randrange(2**32) if seed is None else seed
    print("seed", chosen)
    _compare(client, random.Random(chosen), 150)
