"""Bodies of POST /v1/responses that are refused: each answer names the field, and never generates anything."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from tests.cluster.fake_ingress import FakeIngress, ScriptedSource

USER = {"role": "user", "content": "p"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [USER, {"type": "message", "role": role, "content": content}]}


# The fields of the body, the one at fault, what the message says beside its name.
STORED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
    ({"conversation": "conv_1"}, "conversation", "send the earlier items in input"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "not stored here"),
    ({"background": True}, "background", "use stream"),
    ({"background_options": {"completion_window": "2h"}}, "background_options", "leave it out"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "write the text into instructions"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1]", "send the item itself"),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "send the item itself"),
    ({"generate": False}, "generate", "leave it out"),
]
NOT_DONE: list[tuple[dict[str, Any], str, str]] = [
    ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "shorten input"),
    ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
    ({"include": ["file_search_call.results"]}, "include", "message.output_text.logprobs"),
    ({"include": ["message.input_image.image_url"]}, "include", "may have"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
    ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1]", "offer a function"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools[0]", "code_interpreter"),
    ({"tools": [{"type": "computer_use_preview"}]}, "tools[0]", "not run here"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]", "mcp"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]", "it may be function"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "function or allowed_tools"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "may only be auto"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "function_call_output"),
    (message([{"type": "input_image", "image_url": "x"}]), "input[1].content", "input_image at index 0"),
    (message([{"type": "input_text", "text": "a"}, {"type": "input_file"}]), "input[1].content", "index 1"),
    ({"messages": [USER]}, "messages", "called input"),
    ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"logprobs": True}, "logprobs", "include"),
    ({"n": 2}, "n", "/v1/chat/completions"),
    ({"use_beam_search": True}, "use_beam_search", "/v1/chat/completions"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning.effort"),
    ({"audio": {}}, "audio", "not supported"),
]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is required"),
    ({"input": []}, "input", "at least 1"),
    ({"input": 7}, "input", "must be an array"),
    ({"input": ["p"]}, "input[0]", "must be an object"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
    ({"input": [{"content": "p"}]}, "input[0].role", "is required"),
    (message("p", role="tool"), "input[1].role", "must be 'user'"),
    (message([]), "input[1].content", "empty array"),
    (message(7), "input[1].content", "must be a string"),
    (message([{"type": "text", "text": "a"}]), "input[1].content", "input_text or output_text"),
    (message([{"type": "input_text"}]), "input[1].content", "needs a string as text"),
    ({"input": [USER, CALL | {"arguments": "{"}]}, "input[1].arguments", "must be a JSON object"),
    ({"input": [USER, CALL | {"arguments": "[]"}]}, "input[1].arguments", "must be a JSON object"),
    ({"input": [USER, CALL | {"call_id": ""}]}, "input[1].call_id", "at least 1 character"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "5"}]}, "input[1].call_id",
     "no function_call before it"),
    ({"input": [USER, CALL, {"type": "function_call_output", "call_id": "d", "output": "5"}]}, "input[2].call_id",
     "send the items of earlier answers"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text",
     "is required"),
    ({"instructions": ["p"]}, "instructions", "must be a string"),
    ({"max_output_tokens": 0}, "max_output_tokens", "or equal to 1"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
    ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "at most max_output_tokens"),
    ({"max_output_tokens": "3"}, "max_output_tokens", "must be an integer"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"top_k": 0.5}, "top_k", "must be an integer"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": {}}, "stream_options", "only allowed together with stream"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is required"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is required"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
    ({"tools": [TOOL | {"parameters": "{}"}]}, "tools[0].parameters", "must be an object"),
    ({"tools": [TOOL] * 129}, "tools", "128"),
    ({"tools": {}}, "tools", "must be an array"),
    ({"tools": [{"type": 7}]}, "tools[0]", "a type that is not a string"),
    ({"tools": [{"type": ["web_search"]}]}, "tools[0]", "a type that is not a string"),
    ({"tools": [{"type": {}}]}, "tools[0]", "a type that is not a string"),
    ({"tool_choice": "maybe"}, "tool_choice", '"required"'),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "g"}]}}, "tool_choice", "tools does not have"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most 20"),
    ({"metadata": {"a": 1}}, "metadata", "strings"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "64 characters"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
    ({"reasoning": "low"}, "reasoning", "must be an object"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
]  # fmt: skip


@pytest.fixture(scope="module")
def ingress() -> FakeIngress:
    """One for all: a refusal leaves nothing behind."""
    return FakeIngress(ScriptedSource(), {"server": {"openapi": False}})


@pytest.fixture(scope="module")
def app(ingress: FakeIngress) -> ASGIApp:
    return ingress.app()


async def refusal(ingress: FakeIngress, app: ASGIApp, fields: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    before = ingress.outcomes().get("client_error", 0)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        body = {"input": "p"} | ({"stream": True} if stream else {}) | fields
        response = await http.post("/v1/responses", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert ingress.source.generations == []
    assert ingress.outcomes() == {"client_error": before + 1}
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(("fields", "param", "says"), [*STORED, *NOT_DONE])
async def test_what_is_not_done_here(
    ingress: FakeIngress, app: ASGIApp, fields: dict[str, Any], param: str, says: str
) -> None:
    for stream in (False, True):
        error = await refusal(ingress, app, fields, stream)
        assert (error["param"], error["code"]) == (param, "unsupported"), error
        assert error["message"].startswith(param)
        assert says in error["message"]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
async def test_what_is_wrong(ingress: FakeIngress, app: ASGIApp, fields: dict[str, Any], param: str, says: str) -> None:
    error = await refusal(ingress, app, fields)
    assert error["param"] == param, error
    assert error["code"] != "unsupported"
    assert says in error["message"], error


def test_the_table_is_long_enough() -> None:
    assert len(STORED) + len(NOT_DONE) + len(WRONG) > 80
