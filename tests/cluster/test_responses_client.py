"""OpenAI's own client against the whole HTTP app: create, stream, parse, and what it raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from starlette.types import Message, Receive, Scope, Send

from cluster.api_error import ApiError
from cluster.http.proxy_answers import ProxyAnswers
from tests.cluster.fake_ingress import HANG, LENGTH, MODEL, STOP, FakeIngress, ScriptedSource, Step, text


@asynccontextmanager
async def client(**script: Sequence[Step]) -> AsyncIterator[AsyncOpenAI]:
    ingress = FakeIngress(ScriptedSource(**script), {"server": {"openapi": False}})
    transport = httpx2.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield AsyncOpenAI(base_url="http://x/v1", api_key="sk-test", http_client=http, max_retries=0)
    assert ingress.source.open_prompts == []
    assert ingress.num_in_flight == 0


async def test_create() -> None:
    async with client(p=text(0, "Paris é", STOP)) as c:
        response = await c.responses.create(model=MODEL, input="p", metadata={"a": "b"})
        assert response.output_text == "Paris é"
        assert (response.status, response.metadata, response.error) == ("completed", {"a": "b"}, None)
        assert response.usage is not None
        assert response.usage.output_tokens == len("Paris é".encode())
        assert response._request_id is not None


async def test_create_streamed() -> None:
    async with client(p=text(0, "Paris é", STOP)) as c:
        events = [event async for event in await c.responses.create(model=MODEL, input="p", stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Paris é"
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Paris é"


async def test_stream() -> None:
    async with client(p=text(0, "Paris", STOP)) as c:
        async with c.responses.stream(model=MODEL, input="p") as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots == ["P", "Pa", "Par", "Pari", "Paris"]
        assert final.output_text == "Paris"
        assert final.status == "completed"


async def test_what_was_given_may_be_given_back() -> None:
    """Items of an answer go into the next request as the client has them, and its helpers' own fields with them."""
    async with client(p=text(0, "one", STOP), poneq=text(0, "two", STOP)) as c:
        first = await c.responses.create(model=MODEL, input="p")
        history = [{"role": "user", "content": "p"}, *first.output, {"role": "user", "content": "q"}]
        second = await c.responses.create(model=MODEL, input=history)
        assert second.output_text == "two"


async def test_errors_are_of_the_clients_own_classes() -> None:
    async with client(p=[ApiError(429, "full", code="queue_full", retry_after_s=1)]) as c:
        with pytest.raises(openai.RateLimitError, match="full"):
            await c.responses.create(model=MODEL, input="p", stream=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await c.responses.create(model=MODEL, input="p", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError, match="not exist"):
            await c.responses.create(model="other", input="p")
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await c.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await c.responses.delete("resp_1")
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await c.responses.cancel("resp_1")
        with pytest.raises(openai.NotFoundError, match="not stored"):
            _ = [item async for item in c.responses.input_items.list("resp_1")]


async def test_a_stream_that_fails_raises_behind_the_failed_response() -> None:
    async with client(p=[*text(0, "ab"), ApiError(500, "lost it")]) as c:
        seen: list[Any] = []

        async def read() -> None:
            async for event in await c.responses.create(model=MODEL, input="p", stream=True):
                seen.append(event)  # noqa: PERF401  # what was seen before it raised

        with pytest.raises(openai.APIError, match="lost it"):
            await read()
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.error.message == "lost it"
        async with c.responses.stream(model=MODEL, input="p") as stream:
            with pytest.raises(openai.APIError, match="lost it"):
                await stream.get_final_response()


async def test_a_stream_that_the_ingress_left_raises_too() -> None:
    """Serve's proxy ends it, in the envelope that all streams of ours have."""
    whole = FakeIngress(ScriptedSource(p=[*text(0, "ab"), HANG])).app()

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_die(message: Message) -> None:
            if message["type"] == "http.response.body" and b"output_text.delta" in message["body"]:
                raise RuntimeError("the process has ended")
            await send(message)

        with suppress(RuntimeError):
            await whole(scope, receive, send_or_die)

    transport = httpx2.ASGITransport(app=ProxyAnswers(dies), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        c = AsyncOpenAI(base_url="http://x/v1", api_key="sk-test", http_client=http, max_retries=0)
        stream = await c.responses.create(model=MODEL, input="p", stream=True)
        with pytest.raises(openai.APIError, match="has ended"):
            _ = [event async for event in stream]


async def test_an_incomplete_response_is_none_that_completed() -> None:
    """The client's helper has only word of completed ones; its events tell."""
    async with (
        client(p=text(0, "ab", LENGTH)) as c,
        c.responses.stream(model=MODEL, input="p", max_output_tokens=2) as stream,
    ):
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        assert last.response.output_text == "ab"
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            await stream.get_final_response()
