"""Fields of a chat body that say which tools there are and whether one must be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.config.limits import LimitsConfig
from cluster.openai.body import parse_body
from cluster.openai.request import ChatCompletionBody
from cluster.openai.tools import MAX_TOOLS, ToolMode

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "b"}}


def tool(name: str = "a", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chat(**fields: Any) -> ChatCompletionBody:
    body = json.dumps({"messages": HELLO} | fields).encode()
    return parse_body(body, "application/json", ChatCompletionBody, LimitsConfig())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool()] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [tool(), 1]}, "tools[1]"),
        ({"tools": [tool(), {"function": {"name": "b"}}]}, "tools[1].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(), {"type": "function"}]}, "tools[1].function"),
        ({"tools": [tool(), tool("")]}, "tools[1].function.name"),
        ({"tools": [tool(), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool(), tool("x" * 65)]}, "tools[1].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 1}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "use_beam_search": True}, "thinking_token_budget"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


def test_what_may_be_called() -> None:
    both = [tool(), tool("b", parameters=SCHEMA, strict=True)]
    for fields, mode, in_play, shown in (
        ({}, ToolMode.NONE, [], 0),
        ({"tool_choice": "auto"}, ToolMode.NONE, [], 0),
        ({"tools": []}, ToolMode.NONE, [], 0),
        ({"tools": both}, ToolMode.AUTO, ["a", "b"], 2),
        ({"tools": both, "tool_choice": None}, ToolMode.AUTO, ["a", "b"], 2),
        ({"tools": both, "tool_choice": "none"}, ToolMode.NONE, [], 0),
        ({"tools": both, "tool_choice": "required"}, ToolMode.REQUIRED, ["a", "b"], 2),
        ({"tools": both, "tool_choice": NAMED}, ToolMode.NAMED, ["b"], 2),
    ):
        body = chat(**fields)
        assert body.tool_mode is mode
        assert [tool.function.name for tool in body.tools_in_play] == in_play
        assert len(body.tools_shown) == shown
        assert body.unknown_fields == []


def test_a_template_is_given_tools_as_models_were_taught_them() -> None:
    given = chat(tools=[tool("b", description="d", parameters=SCHEMA, strict=True), tool()]).tools
    assert given[0].for_template() == tool("b", description="d", parameters=SCHEMA)
    assert given[1].for_template() == tool(parameters={"type": "object", "properties": {}})


def test_what_the_assistant_thought_goes_back_under_either_name() -> None:
    for fields in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "no"}):
        (message,) = chat(messages=[{"role": "assistant", "content": "a", **fields}]).template_messages()
        assert (message["reasoning_content"], message["reasoning"]) == ("hm", "hm")
    (message,) = chat(messages=[{"role": "user", "content": "a", "reasoning": "hm"}]).template_messages()
    assert message.keys() == {"role", "content"}
