"""POST /v1/responses over a scripted source of tokens: responses and events as OpenAI's own types demand them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.api_error import ApiError
from cluster.openai.response import ChatAnswer
from cluster.openai.responses.response_events import ResponseEvents
from cluster.openai.responses.response_object import ResponseObject
from cluster.openai.sampling_defaults import SamplingDefaults
from cluster.text.choice import TextDelta
from cluster.text.usage import Usage
from tests.cluster.fake_ingress import HANG, LENGTH, MODEL, STOP, FakeIngress, ScriptedSource, Step, text
from tests.cluster.letter_source import LetterSource

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
LOGPROBS = ["message.output_text.logprobs"]


class Client:
    def __init__(self, ingress: FakeIngress, http: httpx.AsyncClient) -> None:
        self.ingress, self.http = ingress, http

    async def post(self, **fields: Any) -> httpx.Response:
        return await self.http.post(PATH, json={"input": "p", **fields})

    async def whole(self, **fields: Any) -> dict[str, Any]:
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        return checked(response.json())

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        response = await self.post(stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_in(response.content)

    async def response(self, stream: bool, **fields: Any) -> dict[str, Any]:
        """The response, in either mode."""
        if not stream:
            return await self.whole(**fields)
        found: dict[str, Any] = (await self.events(**fields))[-1]["response"]
        return found


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """By the client's own type."""
    Response.model_validate(response)
    return response


def events_in(content: bytes) -> list[dict[str, Any]]:
    """The data of all events, each as the client's own types have it, named and numbered as it should be."""
    *blocks, rest = content.split(b"\n\n")
    assert rest == b""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == number
        assert type(EVENT.validate_python(event)).model_fields["type"].annotation
        if "response" in event:
            checked(event["response"])
        events.append(event)
    return events


@asynccontextmanager
async def client(ingress: FakeIngress | None = None, /, **script: Sequence[Step]) -> AsyncIterator[Client]:
    ingress = ingress or FakeIngress(ScriptedSource(**script), {"server": {"openapi": False}})
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield Client(ingress, http)
    assert getattr(ingress.source, "open_prompts", []) == []
    assert ingress.num_in_flight == 0


# -- answers ---------------------------------------------------------------------------------------


async def test_whole() -> None:
    content = "a\n\nevent: response.failed\n\n🔥é"
    async with client(p=text(0, content, STOP, eos=True)) as c:
        response = await c.whole()
        num_tokens = len(content.encode()) + 1
        (message,) = response["output"]
        assert response["id"].startswith("resp_")
        assert (response["object"], response["status"], response["model"]) == ("response", "completed", MODEL)
        assert message["id"].startswith("msg_")
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        assert message["content"] == [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
        assert response["usage"] == {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 1 + num_tokens,
        }
        assert c.ingress.outcomes() == {"ok": 1}
        assert c.ingress.samples("splitserve_requests", endpoint=PATH, outcome="ok") == 1
        assert c.ingress.samples("splitserve_request_success", finish_reason="stop") == 1


async def test_streamed() -> None:
    content = "a\n\nevent: response.failed\n\n🔥é"  # nothing in a text can break the framing
    async with client(p=text(0, content, STOP, eos=True)) as c:
        events = await c.events()
        created, begun, added, part, *deltas, text_done, part_done, item_done, completed = events
        assert [event["type"] for event in (created, begun)] == ["response.created", "response.in_progress"]
        for event in (created, begun):
            assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert (added["type"], added["item"]["status"], added["item"]["content"]) == (
            "response.output_item.added", "in_progress", [])  # fmt: skip
        assert (part["type"], part["part"]["text"]) == ("response.content_part.added", "")
        assert {delta["type"] for delta in deltas} == {"response.output_text.delta"}
        assert "".join(delta["delta"] for delta in deltas) == text_done["text"] == content
        assert "🔥" in [delta["delta"] for delta in deltas]  # no character is cut
        assert part_done["part"]["text"] == content
        assert completed["type"] == "response.completed"
        assert completed["response"]["output"] == [item_done["item"]]
        assert completed["response"]["status"] == "completed"
        ids = {event["item_id"] for event in (part, *deltas, text_done, part_done)}
        assert ids == {added["item"]["id"]} == {item_done["item"]["id"]}
        assert c.ingress.samples("splitserve_requests", endpoint=PATH, outcome="ok") == 1


async def test_both_modes_give_the_same() -> None:
    async with client(FakeIngress(LetterSource())) as c:
        fields = {"temperature": 0.5, "seed": 3, "max_output_tokens": 9, "include": LOGPROBS, "top_logprobs": 2}
        whole, streamed = await c.whole(**fields), (await c.events(**fields))[-1]["response"]
        for response in (whole, streamed):
            response["output"][0]["id"] = response["id"] = response["created_at"] = response["completed_at"] = None
        assert whole == streamed
        assert len(whole["output"][0]["content"][0]["logprobs"]) == 9


@MODES
async def test_max_output_tokens_leaves_it_incomplete(stream: bool) -> None:
    async with client(p=text(0, "abc", LENGTH)) as c:
        response = await c.response(stream, max_output_tokens=3)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
        assert response["completed_at"] is None
        assert response["max_output_tokens"] == 3
        assert c.ingress.source.specs[0].max_tokens == 3


@MODES
async def test_an_empty_answer_is_an_empty_message(stream: bool) -> None:
    async with client(p=text(0, "", STOP, eos=True)) as c:
        response = await c.response(stream)
        assert [item["content"][0]["text"] for item in response["output"]] == [""]
        assert response["status"] == "completed"


async def test_what_was_asked_is_repeated() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True, "description": "d"}
    asked = {
        "instructions": "",
        "max_output_tokens": 7,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.25,
        "tool_choice": "auto",
        "tools": [tool],
        "top_p": 0.5,
        "user": "u",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "background": False,
        "previous_response_id": None,
    }
    async with client(p=text(0, "a", STOP)) as c:
        response = await c.whole(store=True, service_tier="auto", **asked)
        assert {name: response[name] for name in asked} == asked
        assert response["store"] is False
        assert response["service_tier"] == "default"
        assert response["error"] is response["incomplete_details"] is None


async def test_the_checkpoints_defaults_are_those_that_count_and_are_shown() -> None:
    source = ScriptedSource(p=text(0, "a", STOP))
    async with client(FakeIngress(source, defaults=SamplingDefaults({"temperature": 0.6, "top_p": 0.95}))) as c:
        response = await c.whole(top_p=0.5)
        assert (response["temperature"], response["top_p"]) == (0.6, 0.5)
        assert (source.specs[0].sampling.temperature, source.specs[0].sampling.top_p) == (0.6, 0.5)


async def test_fields_of_chat_go_through() -> None:
    async with client(p=text(0, "hello", LENGTH)) as c:
        response = await c.whole(top_k=7, seed=5, stop=["ll"], priority=3, presence_penalty=0.5)
        assert response["output"][0]["content"][0]["text"] == "he"
        (spec,) = c.ingress.source.specs
        assert (spec.sampling.top_k, spec.sampling.seed, spec.sampling.presence_penalty) == (7, 5, 0.5)
        assert spec.priority == -3


async def test_logprobs_are_of_the_message() -> None:
    async with client(FakeIngress(LetterSource(most=4))) as c:
        events = await c.events(include=LOGPROBS, top_logprobs=2, temperature=0)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        (part,) = events[-1]["response"]["output"][0]["content"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]
        assert "".join(entry["token"] for entry in part["logprobs"][:-1]) == part["text"]
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
        assert events[-1]["response"]["top_logprobs"] == 2
        plain = (await c.whole(temperature=0))["output"][0]["content"][0]
        assert (plain["text"], plain["logprobs"]) == (part["text"], [])


# -- failures --------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("status", [429, 503, 504])
async def test_what_fails_before_the_first_byte_is_a_plain_error(stream: bool, status: int) -> None:
    async with client(p=[ApiError(status, "no", code="queue_full", retry_after_s=2)]) as c:
        response = await c.post(stream=stream)
        assert response.status_code == status
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["message"] == "no"
        assert sum(c.ingress.outcomes().values()) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(500, "server_error"), (504, "server_error"), (429, "rate_limit_exceeded")]
)
async def test_what_fails_later_ends_in_a_failed_response_and_an_error(status: int, code: str) -> None:
    async with client(p=[*text(0, "ab"), ApiError(status, "lost it")]) as c:
        *events, failed, error = await c.events()
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "ab"
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": code, "message": "lost it"}
        (message,) = failed["response"]["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "ab")
        assert (error["type"], error["message"], error["error"]["message"]) == ("error", "lost it", "lost it")
        assert "ok" not in c.ingress.outcomes()


async def test_a_whole_answer_that_fails_later_is_a_plain_error() -> None:
    async with client(p=[*text(0, "ab"), ApiError(500, "lost it")]) as c:
        response = await c.post()
        assert (response.status_code, response.json()["error"]["message"]) == (500, "lost it")
        assert c.ingress.outcomes() == {"server_error": 1}


async def test_an_exception_of_ours_tells_nothing() -> None:
    async with client(p=[*text(0, "ab"), RuntimeError("secret")]) as c:
        response = await c.post(stream=True)
        assert b"secret" not in response.content
        assert events_in(response.content)[-2]["response"]["error"]["message"] == (
            "internal error; the server's log has more"
        )


async def test_a_client_that_goes_ends_the_work() -> None:
    ingress = FakeIngress(ScriptedSource(p=[*text(0, "ab"), HANG]))
    sent: list[Any] = []
    requests = iter([{"type": "http.request", "body": b'{"input": "p", "stream": true}', "more_body": False}])

    async def receive() -> Any:
        if (message := next(requests, None)) is not None:
            return message
        while not any(b"output_text.delta" in message.get("body", b"") for message in sent):
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": PATH, "headers": [],
             "query_string": b"", "http_version": "1.1", "scheme": "http", "raw_path": PATH.encode()}  # fmt: skip
    async with asyncio.timeout(120):
        await ingress.app()(scope, receive, send)
    assert ingress.source.open_prompts == []
    assert ingress.num_in_flight == 0
    assert ingress.outcomes() == {"cancelled": 1}


# -- around it -------------------------------------------------------------------------------------


async def test_a_key_is_needed_where_one_is(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789\n")
    ingress = FakeIngress(ScriptedSource(p=text(0, "a", STOP)), {"auth": {"api_keys_file": str(keys)}})
    async with client(ingress) as c:
        assert (await c.post()).status_code == 401
        response = await c.http.post(PATH, json={"input": "p"}, headers={"authorization": "Bearer sk-0123456789"})
        assert response.status_code == 200


async def test_the_clients_request_id_comes_back() -> None:
    async with client(p=text(0, "a", STOP)) as c:
        response = await c.http.post(PATH, json={"input": "p"}, headers={"x-request-id": "mine-7"})
        assert response.headers["x-request-id"] == "mine-7"


async def test_limits_hold() -> None:
    async with client(FakeIngress(ScriptedSource(), max_body_bytes=1024)) as c:
        response = await c.post(input="a" * 2000)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        response = await c.http.post(PATH, content=b"input=p", headers={"content-type": "text/plain"})
        assert response.status_code == 415


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/conversations"),
        ("GET", "/v1/conversations/conv_1/items"),
    ],
)
async def test_nothing_is_stored(method: str, path: str) -> None:
    async with client() as c:
        response = await c.http.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (404, "not_stored", "not_found_error")
        assert "not stored here" in error["message"]
        assert "input" in error["message"]


@pytest.mark.parametrize(("path", "instead"), [("", "slash"), ("compact", "input"), ("input_tokens", "/tokenize")])
async def test_what_else_the_api_has_says_what_to_use(path: str, instead: str) -> None:
    async with client() as c:
        response = await c.http.post(f"{PATH}/{path}", json={})
        assert response.status_code == 404
        assert instead in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
async def test_anthropics_clients_read_why_not(path: str) -> None:
    async with client() as c:
        response = await c.http.post(path, json={"model": "x", "max_tokens": 5, "messages": []})
        answer = response.json()
        assert response.status_code == 404
        assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
        assert "/v1/chat/completions" in answer["error"]["message"]
        assert answer["request_id"] == response.headers["x-request-id"]


@given(st.lists(st.text() | st.text(alphabet='"\\\n\r\u2028\x00{}:, event🔥é0'), max_size=6))
def test_events_made_by_filling_in_are_the_bytes_of_the_whole_event(pieces: list[str]) -> None:
    """The independent reference: every event of the same items, dumped, which JSON reads back."""
    events = ResponseEvents(ResponseObject({"id": "resp_1"}), ChatAnswer("id", "model", 7), lambda: Usage(1, 1))
    content = b"".join([events.of([TextDelta(0, piece, None, 5)]) for piece in pieces])
    content += events.of([TextDelta(0, "end", "stop", 5)]) + events.end()
    told = [json.loads(block.split(b"\ndata: ")[1]) for block in content.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == [piece for piece in [*pieces, "end"] if piece]
    same = {json.dumps({**event, "delta": "", "sequence_number": 0}) for event in deltas}
    assert len(same) == 1
    assert list(deltas[0]) == [
        "type",
        "sequence_number",
        "item_id",
        "output_index",
        "content_index",
        "delta",
        "logprobs",
    ]
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "".join(pieces) + "end"
