"""Answers of the API. Names such as b10 are those of faults that other servers had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.openai.response import (
    SSE_DONE,
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    Usage,
    json_bytes,
    new_chat_id,
    new_completion_id,
    sse_error,
    sse_event,
)
from cluster.openai.served_model import model_list

USAGE = Usage(prompt_tokens=7, completion_tokens=5)
CHOICES = [Choice(0, "one", "stop"), Choice(1, 'two\n\ndata: "x" \u2028🔥', "length")]


def answers(**options: Any) -> list[Answer]:
    chat_answer = ChatAnswer(id=new_chat_id(), model="m", created=5, **options)
    return [chat_answer, CompletionAnswer(id=new_completion_id(), model="m", created=5, **options)]


def stream(answer: Answer) -> list[dict[str, Any]]:
    """A whole stream of two choices."""
    chunks = [chunk for choice in CHOICES if (chunk := answer.opening(choice.index))]
    for choice in CHOICES:
        chunks += [answer.delta(choice.index, char) for char in choice.text]
        chunks.append(answer.finish(choice.index, choice.finish_reason))
    return [*chunks, answer.usage_chunk(USAGE)] if answer.include_usage else chunks


def test_whole_answers_are_what_openais_client_expects() -> None:
    chat_types = pytest.importorskip("openai.types.chat")
    types = pytest.importorskip("openai.types")
    parsed = chat_types.ChatCompletion.model_validate_json(json_bytes(answers()[0].whole(CHOICES, USAGE)), strict=True)
    assert parsed.id.startswith("chatcmpl-")
    assert parsed.object == "chat.completion"
    assert [(c.index, c.message.content, c.finish_reason) for c in parsed.choices] == [
        (c.index, c.text, c.finish_reason) for c in CHOICES
    ]
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (7, 5, 12)
    parsed = types.Completion.model_validate_json(json_bytes(answers()[1].whole(CHOICES, USAGE)), strict=True)
    assert parsed.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in parsed.choices] == [
        (c.index, c.text, c.finish_reason) for c in CHOICES
    ]
    listed = types.Model.model_validate(model_list("m", 5, 2048)["data"][0], strict=True)
    assert (listed.id, listed.object) == ("m", "model")


def test_chunks_are_what_openais_client_expects() -> None:
    chunk_type = pytest.importorskip("openai.types.chat").ChatCompletionChunk
    completion_type = pytest.importorskip("openai.types").Completion
    for chunk in stream(answers(include_usage=True)[0]):
        assert chunk_type.model_validate(chunk, strict=True).object == "chat.completion.chunk"
    for chunk in stream(answers(include_usage=True)[1]):
        if chunk["choices"] and chunk["choices"][0]["finish_reason"] is None:
            continue  # the client's own type is wrong about null here
        assert completion_type.model_validate(chunk, strict=True).object == "text_completion"


def test_b10_b11_order_of_a_stream() -> None:
    chat_chunks, text_chunks = map(stream, answers())
    assert [c["choices"][0]["delta"] for c in chat_chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    for chunks, text_of in ((chat_chunks, lambda c: c["delta"].get("content", "")), (text_chunks, lambda c: c["text"])):
        for expected in CHOICES:
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected.index]
            assert "".join(map(text_of, own)) == expected.text
            assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [expected.finish_reason]
            assert text_of(own[-1]) == ""
        assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_b16_usage_of_streams() -> None:
    for answer in answers(include_usage=True):
        *chunks, last = stream(answer)
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    for answer in answers():
        assert all("usage" not in chunk for chunk in stream(answer))


def test_optional_parts_of_answers() -> None:
    for answer in answers(system_fingerprint="fp"):
        assert answer.whole(CHOICES, USAGE)["system_fingerprint"] == "fp"
        assert answer.delta(0, "x")["system_fingerprint"] == "fp"
    assert "system_fingerprint" not in answers()[0].delta(0, "x")
    assert Usage(7, 5, cached_tokens=4).as_dict()["prompt_tokens_details"] == {"cached_tokens": 4}


def test_ids_are_unique() -> None:
    assert len({new_chat_id() for _ in range(1000)}) == 1000


def test_b25_an_event_is_one_line_whatever_the_text() -> None:
    event = sse_event(answers()[0].delta(0, 'a\n\ndata: x\r\n\r"\u2028\u0085🔥\0'))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    assert json.loads(event[6:])["choices"][0]["delta"]["content"] == 'a\n\ndata: x\r\n\r"\u2028\u0085🔥\0'
    assert SSE_DONE == b"data: [DONE]\n\n"


def test_b14_error_event() -> None:
    event = sse_error(ApiError(500, "lost", code="kv_lost"))
    error = {"message": "lost", "type": "server_error", "param": None, "code": "kv_lost"}
    assert json.loads(event.removeprefix(b"data: ")) == {"error": error}
