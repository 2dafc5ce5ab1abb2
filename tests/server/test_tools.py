"""Calls of tools and schemas of answers on a real server: its small model knows of none, and is held to them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import API_KEY
from tests.server.running_server import RunningServer

MODEL = "SmolLM2-135M-Instruct"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris tomorrow?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["C", "F"]},
        "day": {"type": "integer"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": SCHEMA, "get_time": {"type": "object", "maxProperties": 0}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "get_time"}},
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calls_that_are_required(api_server: RunningServer, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
            fields: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 7, "n": 2}
            request: Any = {
                "model": MODEL,
                "messages": MESSAGES,
                "temperature": temperature,
                "max_tokens": 80,
                **fields,
            }
            whole = client.chat.completions.create(**request)
            with client.chat.completions.stream(**request) as stream:
                streamed = stream.get_final_completion()
            for one, other in zip(whole.choices, streamed.choices, strict=True):
                assert one.finish_reason == other.finish_reason == "tool_calls"
                (call,) = one.message.tool_calls
                (same,) = other.message.tool_calls
                assert call.function.name == same.function.name
                assert call.function.arguments == same.function.arguments
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
                assert one.message.content is None
                if choice != "required":
                    assert call.function.name == "get_time"


def test_parsed_arguments_and_a_conversation_that_cannot_go_on(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            tools=TOOLS[:1],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.parsed_arguments == json.loads(call.function.arguments)
        asking = answer.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        with pytest.raises(openai.BadRequestError, match="does not support tool calls") as refused:
            client.chat.completions.create(model=MODEL, messages=[*MESSAGES, asking, result])
        assert refused.value.param == "messages[1].tool_calls"


def test_with_auto_the_small_model_answers_in_text(api_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key=API_KEY) as client:
        plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
        with_tools = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, tools=TOOLS
        )
        assert with_tools.choices[0].message.content == plain.choices[0].message.content
        assert with_tools.choices[0].message.tool_calls is None
