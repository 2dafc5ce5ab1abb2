"""HTTP over a scripted source of tokens: bodies, streams, errors before and after the first token, the envelope.

Whatever happens, a request is counted once, the gauge of requests in flight is back at zero, and no work goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.api_error import ApiError
from cluster.http import api_schemas as answers
from cluster.routing.slow_transfers import SlowestRead
from tests.cluster.fake_ingress import HANG, LENGTH, MODEL, STOP, FakeIngress, ScriptedSource, Step, text

C, H = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [C, H])
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def body_of(path: str, *prompts: str, **values: Any) -> dict[str, Any]:
    prompt = {"prompt": list(prompts)} if path == C else {"messages": [{"role": "user", "content": prompts[0]}]}
    return prompt | {"max_tokens": 100} | values


class Client:
    def __init__(self, ingress: FakeIngress, http: httpx.AsyncClient) -> None:
        self.ingress, self.http = ingress, http

    async def post(self, path: str, *prompts: str, **values: Any) -> httpx.Response:
        return await self.http.post(path, json=body_of(path, *prompts, **values))

    async def events(self, path: str, *prompts: str, **values: Any) -> list[Any]:
        """The events of a stream: JSON decoded, "[DONE]" as it is."""
        response = await self.post(path, *prompts, stream=True, **values)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_in(response.content)


def events_in(content: bytes) -> list[Any]:
    *blocks, rest = content.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [block[6:].decode() if block == b"data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def client(limits: dict[str, int] | None = None, **script: Sequence[Step]) -> AsyncIterator[Client]:
    ingress = FakeIngress(ScriptedSource(**script), **(limits or {}))
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield Client(ingress, http)
    assert ingress.source.open_prompts == []
    assert ingress.num_in_flight == 0


# -- answers ---------------------------------------------------------------------------------------


@MODES
async def test_chat(stream: bool) -> None:
    content = "a\n\ndata: [DONE]\n\n🔥é"  # nothing in a text can break the framing, and no character is cut
    async with client(p=text(0, content, STOP, eos=True)) as c:
        if not stream:
            response = await c.post(H, "p")
            answer = response.json()
            assert response.headers["content-type"] == "application/json"
            assert answer["choices"][0]["message"]["content"] == content
            assert answer["choices"][0]["finish_reason"] == "stop"
            counts = {"prompt_tokens": 1, "completion_tokens": 24, "total_tokens": 25}
            assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        else:
            opening, *deltas, finish, done = await c.events(H, "p")
            assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            pieces = [delta["choices"][0]["delta"]["content"] for delta in deltas]
            assert "".join(pieces) == content
            assert "🔥" in pieces
            assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["delta"]) == ("stop", {})
            assert done == "[DONE]"
        assert c.ingress.outcomes() == {"ok": 1}
        assert c.ingress.samples("splitserve_request_success", finish_reason="stop") == 1


@MODES
@pytest.mark.parametrize(
    ("stops", "include", "shown", "num_tokens"),
    [
        (["lo w"], False, "hel", 7),
        (["lo w"], True, "hello w", 7),
        (["h"], False, "", 1),
        (["rldX", "zzz"], False, "hello world", 11),
        (["ld"], False, "hello wor", 11),
    ],
)
async def test_stop_strings_across_tokens(
    stream: bool, stops: list[str], include: bool, shown: str, num_tokens: int
) -> None:
    """The same text and usage in both modes, though a stop is cut into tokens."""
    values = {"stop": stops, "include_stop_str_in_output": include}
    async with client(p=text(0, "hello world", LENGTH)) as c:
        if not stream:
            answer = (await c.post(C, "p", **values)).json()
            got, reason, usage = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]
        else:
            *chunks, last, _ = await c.events(C, "p", stream_options={"include_usage": True}, **values)
            got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
        assert (got, reason) == (shown, "length" if shown == "hello world" else "stop")
        assert usage["completion_tokens"] == num_tokens
        assert c.ingress.samples("splitserve_generation_tokens") == num_tokens


async def test_usage_comes_once_and_only_when_asked_for() -> None:
    async with client(p=text(0, "abc", LENGTH)) as c:
        *chunks, last, done = await c.events(C, "p", stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in chunks] == [None] * 4
        assert (last["choices"], last["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")
        for options in ({"stream_options": {}}, {"stream_options": None}):
            assert all("usage" not in event for event in (await c.events(C, "p", **options))[:-1])


@MODES
async def test_prompts_and_choices_keep_their_indices(stream: bool) -> None:
    """One choice is stopped early by a stop string; its prompt's other choice goes on."""
    script = {
        "p": [*text(0, "p0#"), *text(1, "p1"), *text(0, "never", LENGTH), *text(1, "!", LENGTH), HANG],
        "q": [*text(1, "q1", LENGTH), *text(0, "q0", LENGTH)],
    }
    async with client(**script) as c:
        if not stream:
            choices = (await c.post(C, "p", "q", n=2, stop="#")).json()["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
            got = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in choices}
        else:
            got = {}
            for event in (await c.events(C, "p", "q", n=2, stop="#"))[:-1]:
                (choice,) = event["choices"]
                index = choice["index"]
                assert got.get(index, ("", None))[1] is None, "nothing comes after a finish"
                got[index] = (got.get(index, ("", None))[0] + choice["text"], choice["finish_reason"])
        assert got == {0: ("p0", "stop"), 1: ("p1!", "length"), 2: ("q0", "length"), 3: ("q1", "length")}
        assert c.ingress.outcomes() == {"ok": 1}
        assert c.ingress.samples("splitserve_prompt_tokens") == 2


@pytest.mark.parametrize(
    "path", ["/health", "/health/ready", "/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}"]
)
async def test_head_is_answered_as_get(path: str) -> None:
    async with client() as c:
        got, probed = await c.http.get(path), await c.http.head(path)
        assert (probed.status_code, probed.headers["content-type"]) == (200, got.headers["content-type"])
        c.ingress.missing = ["decode"]
        assert (await c.http.head("/health/ready")).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/version", "/metrics", "/v1/models"])
async def test_what_is_not_generation(path: str) -> None:
    async with client() as c:
        assert (await c.http.get(path)).status_code == 200
        assert (await c.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        c.ingress.missing = ["decode"]
        ready = await c.http.get("/health/ready")
        assert (ready.status_code, ready.json()["missing_pools"]) == (503, ["decode"])
        assert c.ingress.outcomes() == {}


async def test_readiness_tells_how_fast_kv_is_read_at_least() -> None:
    async with client() as c:
        assert (await c.http.get("/health/ready")).json() == {"status": "ready"}
        c.ingress.slowest_read = SlowestRead("decode-1", "prefill-1", 0.54e9, 5e9)
        found = (await c.http.get("/health/ready")).json()
        slowest = {"reader": "decode-1", "source": "prefill-1", "gb_per_s": 0.54}
        assert found == {"status": "ready", "slowest_transfer": slowest}
        answers.Readiness.model_validate(found)


async def test_while_it_drains_streams_go_on_and_nothing_new_is_taken() -> None:
    async with client(p=[*text(0, "ab"), HANG], q=text(0, "x", LENGTH)) as c:
        stream = asyncio.create_task(c.post(C, "p", stream=True))
        while c.ingress.source.open_prompts != ["p"]:
            await asyncio.sleep(0)
        c.ingress.drain.begin()
        for path in (C, H):
            refused = await c.post(path, "q")
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert (await c.http.get("/health")).status_code == 200
        assert c.ingress.samples("splitserve_request_rejections", reason="draining") == 2
        assert (c.ingress.drain.num_open, c.ingress.source.open_prompts) == (1, ["p"])
        stream.cancel()
        await asyncio.wait({stream})
        assert c.ingress.drain.num_open == 0


# -- errors ----------------------------------------------------------------------------------------

FAILURES = [
    (ApiError(429, "later", retry_after_s=2.5), 429, "rejected", "3"),
    (ApiError(503, "nobody", retry_after_s=1.0), 503, "rejected", "1"),
    (ApiError(400, "never fits", param="max_tokens"), 400, "client_error", None),
    (ApiError(504, "too slow"), 504, "timeout", None),
    (ApiError(500, "failed"), 500, "server_error", None),
    (RuntimeError("the prompt was a secret"), 500, "server_error", None),
]


@BOTH
@MODES
@pytest.mark.parametrize(("error", "status", "outcome", "retry_after"), FAILURES, ids=str)
async def test_before_the_first_token_a_failure_is_a_plain_error(
    path: str, stream: bool, error: Exception, status: int, outcome: str, retry_after: str | None
) -> None:
    """With its status and headers, in JSON, also when a stream was asked for."""
    async with client(p=[error]) as c:
        response = await c.post(path, "p", stream=stream)
        assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in response.text
        assert c.ingress.outcomes() == {outcome: 1}


@BOTH
@pytest.mark.parametrize(("error", "status", "outcome", "retry_after"), FAILURES, ids=str)
async def test_after_it_the_error_is_the_last_event(
    path: str, error: Exception, status: int, outcome: str, retry_after: str | None
) -> None:
    """And no [DONE]; the text before it is not taken back."""
    async with client(p=[*text(0, "abc"), error]) as c:
        *chunks, last = await c.events(path, "p")
        assert "[DONE]" not in chunks
        assert all("error" not in chunk for chunk in chunks)
        assert set(last) == {"error"}
        assert "secret" not in json.dumps(last)
        assert len(chunks) == (3 if path == C else 4)
        assert c.ingress.outcomes() == {outcome: 1}


async def test_after_it_a_whole_answer_fails_as_a_whole() -> None:
    async with client(p=[*text(0, "abc"), ApiError(500, "failed")], q=[*text(0, "abc"), HANG]) as c:
        assert (await c.post(C, "p", "q")).status_code == 500
        assert c.ingress.outcomes() == {"server_error": 1}


@BOTH
@MODES
@pytest.mark.parametrize("values", [{"model": "other"}, {"n": 0}, {"max_tokens": 1000}, {"n": 8, "max_tokens": 500}])
async def test_what_is_wrong_with_a_request_is_said_before_anything_runs(
    path: str, stream: bool, values: dict[str, Any]
) -> None:
    async with client({"max_generated_tokens": 3000}, p=[HANG]) as c:
        response = await c.post(path, "p", stream=stream, **values)
        assert response.status_code == (404 if "model" in values else 400)
        assert response.json()["error"]["param"] in ("model", "n", "max_tokens")
        assert c.ingress.source.specs == []
        assert c.ingress.outcomes() == {"client_error": 1}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", C, 405),
        ("PUT", H, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
async def test_unknown_routes_and_methods_answer_in_the_envelope(method: str, path: str, status: int) -> None:
    async with client() as c:
        response = await c.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (status == 405) == ("allow" in response.headers)
        assert c.ingress.outcomes() == {}


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_not_read_to_its_end(chunked: bool) -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield b" " * 1000

    async with client({"max_body_bytes": 2000}) as c:
        response = await c.http.post(C, content=endless() if chunked else b" " * 2001)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert num_read <= 4
        assert c.ingress.outcomes() == {"client_error": 1}


# -- whose turn it is ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("given", "ours"), [({}, 0), ({"priority": 7}, -7), ({"priority": -3}, 3), ({"priority": None}, 0)]
)
async def test_a_smaller_priority_goes_first_as_in_vllm(path: str, given: dict[str, Any], ours: int) -> None:
    async with client({"min_priority": -3}, p=text(0, "x", STOP)) as c:
        assert (await c.post(path, "p", **given)).status_code == 200
        assert [spec.priority for spec in c.ingress.source.specs] == [ours]


@BOTH
@pytest.mark.parametrize("priority", [-1, 101, 1.5, "1", True])
async def test_a_priority_out_of_bounds_is_refused(path: str, priority: Any) -> None:
    async with client(p=text(0, "x", STOP)) as c:
        response = await c.post(path, "p", priority=priority)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
        assert c.ingress.source.specs == []


async def test_every_prompt_of_a_request_is_its_client_s() -> None:
    ingress = FakeIngress(ScriptedSource(p=text(0, "x", STOP), q=text(0, "y", STOP)), {"fairness": {"by": "api_key"}})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=ingress.app()), base_url="http://x") as http:
        for key in ("key-of-a", "key-of-b", "key-of-a"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await http.post(C, json=body_of(C, "p", "q"), headers=headers)).status_code == 200
    labels = [spec.client for spec in ingress.source.specs]
    assert labels[0] == labels[1] == labels[4] == labels[5] != labels[2] == labels[3]
    assert not any("key" in label for label in labels)
