"""Requests of the tests, and what came back."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.golden.golden_set import Golden
from tests.server.running_server import RunningServer


@dataclass(frozen=True, slots=True)
class Completed:
    """One choice of an answer."""

    text: str
    token_ids: list[int]
    finish_reason: str


def golden_request(golden: Golden, max_tokens: int = 64) -> tuple[str, dict[str, Any]]:
    """Path and body that ask for a golden output."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    if golden.kind == "chat":
        return "/v1/chat/completions", {**body, "messages": golden.source}
    return "/v1/completions", {**body, "prompt": golden.source}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Completed]:
    """The choices of an answer that is not streamed."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [Completed(_text_of(choice), choice["token_ids"], choice["finish_reason"]) for choice in choices]


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Completed]:
    """The choices of a streamed answer, put together."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for event in stream_events(client, path, body):
        assert "choices" in event, event
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text_of(choice)
            ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            if choice["finish_reason"] is not None:
                assert index not in reasons
                reasons[index] = choice["finish_reason"]
    return [Completed(texts[index], ids[index], reasons[index]) for index in sorted(texts)]


def stream_events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream but the closing [DONE], which must be there."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def post_all(
    server: RunningServer,
    requests: list[tuple[str, dict[str, Any]]],
    num_at_once: int,
    streamed: bool = False,
    timeout_s: float = 300.0,
) -> list[list[Completed]]:
    """Answers in the order of the requests, so many in flight at a time. timeout_s: of each."""
    with server.client(timeout_s) as client, ThreadPoolExecutor(num_at_once) as pool:
        send = stream if streamed else post
        return list(pool.map(lambda request: send(client, *request), requests))


def _text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        text: str = choice["text"]
        return text
    content = choice.get("message", choice.get("delta"))
    return content.get("content") or ""


def cut_connections(client: httpx.Client) -> None:
    """Under what is being asked over them."""
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
        connection._connection._network_stream.get_extra_info("socket").shutdown(2)
