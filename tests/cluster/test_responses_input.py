"""Bodies of POST /v1/responses as bodies of chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.config.limits import LimitsConfig
from cluster.openai.body import valid_body
from cluster.openai.responses.chat_fields import ChatRequest, FieldNames, chat_fields, chat_request
from cluster.openai.responses.request import ResponsesBody

LIMITS = LimitsConfig()
USER = {"role": "user", "content": "p"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def body(**fields: Any) -> ResponsesBody:
    return valid_body({"input": "p", **fields}, ResponsesBody, LIMITS)


def translated(**fields: Any) -> ChatRequest:
    return chat_request(body(**fields), LIMITS)


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """As the chat body gets them."""
    found: list[dict[str, Any]] = chat_fields(body(input=list(items), **fields))[0]["messages"]
    return found


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f",
            "arguments": arguments, "status": "completed"}  # fmt: skip


def returned(number: int, output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def called(*numbers: int) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": "{}"}
    return [{"id": f"c{number}", "type": "function", "function": function} for number in numbers]


def test_a_text_is_what_a_user_says() -> None:
    assert translated().body.template_messages() == [{"role": "user", "content": "p"}]


def test_instructions_come_first() -> None:
    got = translated(instructions="be brief", input=[{"role": "developer", "content": "d"}, USER]).body
    assert [(message["role"], message["content"]) for message in got.template_messages()] == [
        ("system", "be brief"),
        ("developer", "d"),
        ("user", "p"),
    ]


def test_parts_are_one_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [
        {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "d"},
    ]
    got = messages({"role": "user", "content": parts}, {"type": "message", "id": "msg_1", "role": "assistant",
                                                        "status": "completed", "content": said})  # fmt: skip
    assert [message["content"] for message in got] == ["a\nb", "c\nd"]


def test_one_answer_is_one_message() -> None:
    said = {"role": "assistant", "content": "so"}
    got = messages(USER, THOUGHT, said, call(1), call(2), returned(1), returned(2, [
        {"type": "input_text", "text": "6"}]), THOUGHT, said)  # fmt: skip
    assert got == [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": called(1, 2)},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "tool", "content": "6", "tool_call_id": "c2"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]


def test_answers_that_follow_each_other_stay_apart() -> None:
    said = {"role": "assistant", "content": "so"}
    assert messages(said, said) == [said, said]
    got = messages(USER, call(1), said)
    assert [message.get("tool_calls") for message in got] == [None, called(1), None]


def test_reasoning_without_text_is_left_aside() -> None:
    encrypted = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
                 "encrypted_content": "gAAAA"}  # fmt: skip
    assert messages(USER, encrypted) == [{"role": "user", "content": "p"}]


def test_an_empty_string_of_arguments_means_none() -> None:
    got = translated(input=[USER, call(1, "")]).body.template_messages()
    assert got[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_have_chats_shape() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    fields, _ = chat_fields(body(tools=[tool], tool_choice={"type": "function", "name": "f"}))
    assert fields["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"},
                                          "strict": True}}
    ]  # fmt: skip
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert "parallel_tool_calls" not in fields
    assert chat_fields(body(tools=[tool], parallel_tool_calls=False))[0]["parallel_tool_calls"] is False


def test_allowed_tools_are_those_that_the_prompt_has() -> None:
    tools = [{"type": "function", "name": name} for name in "fgh"]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": name} for name in "hf"],
    }
    fields, names = chat_fields(body(tools=tools, tool_choice=allowed))
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["f", "h"]
    assert fields["tool_choice"] == "required"
    assert names.tool(1) == "tools[2]"


@pytest.mark.parametrize(
    ("given", "chat"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
        ),
    ],
)
def test_the_format_is_chats_response_format(given: dict[str, Any], chat: dict[str, Any] | None) -> None:
    assert chat_fields(body(text={"format": given}))[0].get("response_format") == chat


def test_reasoning_effort_is_chats() -> None:
    assert chat_fields(body(reasoning={"effort": "low", "summary": "auto"}))[0]["reasoning_effort"] == "low"
    assert "reasoning_effort" not in chat_fields(body(reasoning={}))[0]


@pytest.mark.parametrize(
    ("param", "message", "expected_param", "expected"),
    [
        ("messages[1].role", "no support for roles", "input[0]", "no support for roles"),
        ("messages[0].content", "messages[0].content is long", "instructions", "instructions is long"),
        ("messages[3].tool_calls[0].function", "messages[3].tool_calls[0].function is odd", "input[4]",
         "input[4] is odd"),
        ("messages", "the template does not take these messages", "input", "the template does not take these messages"),
        ("max_completion_tokens", "max_tokens is 5", "max_output_tokens", "max_output_tokens is 5"),
        ("response_format.json_schema.schema", "response_format.json_schema.schema has not", "text.format.schema",
         "text.format.schema has not"),
        ("tools[0].function.parameters", "tools[0].function.parameters is odd", "tools[1].parameters",
         "tools[1].parameters is odd"),
        ("tool_choice.function.name", "tool_choice.function.name is not there", "tool_choice.name",
         "tool_choice.name is not there"),
        ("top_k", "top_k is odd", "top_k", "top_k is odd"),
        (None, "something", None, "something"),
    ],
)  # fmt: skip
def test_errors_name_the_clients_own_fields(
    param: str | None, message: str, expected_param: str | None, expected: str
) -> None:
    names = FieldNames(("instructions", "input[0]", "input[2]", "input[4]"), (1,))
    got = names.error(ApiError(429, message, None, param, "code", 2.5))
    assert (got.param, got.message) == (expected_param, expected)
    assert (got.status, got.code, got.retry_after_s) == (429, "code", 2.5)


def test_a_field_that_chat_refuses_is_named_as_here() -> None:
    with pytest.raises(ApiError) as refused:
        translated(audio={})
    assert refused.value.param == "audio"
