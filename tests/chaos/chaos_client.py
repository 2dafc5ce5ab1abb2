"""One stream as its client sees it: what came, when, and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.asked import Asked

# Longer than any promise: who waits so long for one event has found a stream that hangs.
HANGS_AFTER_S = 120.0


@dataclass(slots=True)
class Choice:
    """What has come of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class Stream:
    """first_s: when the first token came. longest_pause_s: between two events after that. error: how it failed, in a
    few words that are the same for all that fail so; None: it came to its end, or its client left."""

    asked: Asked
    began_s: float
    ended_s: float = 0.0
    first_s: float | None = None
    longest_pause_s: float = 0.0
    choices: dict[int, Choice] = field(default_factory=dict)
    error: str | None = None
    has_left: bool = False

    @property
    def is_whole(self) -> bool:
        return self.error is None and not self.has_left

    @property
    def hangs(self) -> bool:
        return self.error == _HANGS


_HANGS = f"nothing for {HANGS_AFTER_S:.0f} s"


def read_stream(url: str, asked: Asked, salt: str | None = None, leaves_after: int | None = None) -> Stream:
    """Ask, and read to the end. Blocks; raises nothing of the network: that is in the stream's error.

    salt: of the prefix cache; with one of its own a prompt is computed, and its KV moved. leaves_after: events after
    which the client closes its connection.
    """
    stream = Stream(asked, time.monotonic())
    body = {**asked.body, "stream": True} | ({} if salt is None else {"cache_salt": salt})
    try:
        # A connection of its own: a kept one would hide what happens to new ones. Without certificates, which it would
        # read each time.
        with (
            httpx.Client(base_url=url, timeout=HANGS_AFTER_S, verify=False, trust_env=False) as client,
            client.stream("POST", asked.path, json=body) as response,
        ):
            stream.error = _read(response, stream, leaves_after)
    except httpx.ReadTimeout:
        stream.error = _HANGS
    except httpx.ConnectError:
        stream.error = "connection refused"
    except (httpx.TransportError, OSError):
        stream.error = "connection cut" if stream.first_s else "connection cut before the first token"
    stream.ended_s = time.monotonic()
    return stream


def _read(response: httpx.Response, stream: Stream, leaves_after: int | None) -> str | None:
    """What was wrong. Raises httpx.TransportError."""
    if response.status_code != 200:
        response.read()
        return f"status {response.status_code} {_code_of(response.text)}"
    last_s = None
    for number, event in enumerate(_events(response), start=1):
        now_s = time.monotonic()
        if event is None:
            is_over = len(stream.choices) == stream.asked.num_choices
            is_over &= all(choice.finish_reason for choice in stream.choices.values())
            return None if is_over else "[DONE] before the end"
        if "error" in event:
            return f"error event {event['error'].get('code')}"
        if _take(event, stream):
            if last_s is not None:
                stream.longest_pause_s = max(stream.longest_pause_s, now_s - last_s)
            stream.first_s = stream.first_s or now_s
            last_s = now_s
        if number == leaves_after:
            stream.has_left = True
            return None
    return "ended without [DONE]"


def _events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """Each as it comes; None: the closing [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def _take(event: dict[str, Any], stream: Stream) -> bool:
    """Whether there was a token in it."""
    has_token = False
    for part in event["choices"]:
        choice = stream.choices.setdefault(part["index"], Choice())
        ids = part.get("token_ids") or []
        has_token |= bool(ids)
        choice.token_ids.extend(ids)
        choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
        choice.finish_reason = part["finish_reason"] or choice.finish_reason
    return has_token


def _code_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "without an envelope"
