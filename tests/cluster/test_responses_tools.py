"""Function tools, structured text and reasoning over POST /v1/responses, through the chat path that has them."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.cluster.fake_ingress import MODEL, STOP, ByteTokenizer, FakeIngress, ScriptedSource, text
from tests.cluster.test_responses import Client, client, events_in

# A template by which the answers of Qwen3's family are known.
TEMPLATE = "{{ tools }} <tool_call> </tool_call> <think> </think> tool_calls 'tool'"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ARGUMENTS = ('{"city": "Par\\u00eds 🔥"}', '{"city": "Rome"}')
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>' for arguments in ARGUMENTS
)
ANSWER = f"<think>\nHm, é.\n</think>\n\nLet me see.{CALLS}"
ITEMS = [
    ("reasoning", "Hm, é."),
    ("message", "Let me see."),
    ("function_call", ARGUMENTS[0]),
    ("function_call", ARGUMENTS[1]),
]


def ingress(**script: str) -> FakeIngress:
    tokens = {prompt: text(0, answer, STOP, eos=True) for prompt, answer in script.items()}
    return FakeIngress(ScriptedSource(**tokens), {"server": {"openapi": False}}, tokenizer=ByteTokenizer(TEMPLATE))


def official(http: httpx2.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://x/v1", api_key="sk-test", http_client=http, max_retries=0)


def texts(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


async def test_reasoning_a_message_and_calls_are_items() -> None:
    async with client(ingress(p=ANSWER)) as c:
        whole = await c.whole(tools=[WEATHER])
        assert texts(whole) == ITEMS
        assert whole["status"] == "completed"
        assert [item["status"] for item in whole["output"]] == ["completed"] * 4
        assert [item["name"] for item in whole["output"][2:]] == ["get_weather"] * 2
        assert len({item["call_id"] for item in whole["output"][2:]}) == 2
        assert whole["tools"] == [WEATHER]
        assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
        (_, options) = c.ingress.tokenizer.rendered[0]
        assert options is not None
        assert [tool["function"]["name"] for tool in options.tools] == ["get_weather"]


async def test_the_events_tell_the_same() -> None:
    async with client(ingress(p=ANSWER)) as c:
        events = await c.events(tools=[WEATHER])
        assert events[-1]["type"] == "response.completed"
        assert texts(events[-1]["response"]) == ITEMS
        joined: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                joined[event["output_index"]] = joined.get(event["output_index"], "") + event["delta"]
        assert list(joined.values()) == [text for _, text in ITEMS]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        kinds = {event["type"] for event in events}
        assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds


async def test_a_call_that_max_output_tokens_cut_is_incomplete() -> None:
    from replicas.messages import FinishReason

    source = ScriptedSource(p=text(0, '<tool_call>\n{"name": "get_weather", "arguments": {"ci', FinishReason.LENGTH))
    async with client(FakeIngress(source, tokenizer=ByteTokenizer(TEMPLATE))) as c:
        for response in (await c.whole(tools=[WEATHER]), (await c.events(tools=[WEATHER]))[-1]["response"]):
            assert texts(response) == [("function_call", '{"ci')]
            assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


async def test_what_came_goes_back_to_the_template() -> None:
    """The whole turn of an agent: calls, their outputs, the answer; reasoning comes along."""
    async with client(ingress(p=ANSWER, **{"pLet me see.sunnyrain": "Sunny."})) as c:
        first = await c.whole(tools=[WEATHER])
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": output}
            for item, output in zip(first["output"][2:], ("sunny", "rain"), strict=True)
        ]
        history = [{"role": "user", "content": "p"}, *first["output"], *outputs]
        second = await c.whole(tools=[WEATHER], input=history)
        assert texts(second) == [("message", "Sunny.")]
        messages, _ = c.ingress.tokenizer.rendered[-1]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["reasoning_content"] == "Hm, é."
        assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [
            json.loads(arguments) for arguments in ARGUMENTS
        ]
        assert [message["tool_call_id"] for message in messages[2:]] == [
            call["id"] for call in messages[1]["tool_calls"]
        ]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", []),
        ("auto", ["f", "g"]),
        ("required", ["f", "g"]),
        ({"type": "function", "name": "g"}, ["f", "g"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, ["g"]),
    ],
)
async def test_the_choice_of_tools(choice: Any, shown: list[str]) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
    async with client(ingress(p='<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')) as c:
        response = await c.whole(tools=tools, tool_choice=choice)
        assert response["tool_choice"] == choice
        (_, options) = c.ingress.tokenizer.rendered[0]
        assert options is not None
        assert [tool["function"]["name"] for tool in options.tools] == shown
        is_forced = choice == "required" or (isinstance(choice, dict) and choice["type"] == "function")
        assert (c.ingress.source.specs[0].grammar is not None) >= is_forced
        if shown:
            assert texts(response) == [("function_call", "{}")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_parameters_are_repeated_however_deep_or_refused(choice: str, stream: bool) -> None:
    """A body may be nested deeper than what can be written: that is found out before anything is generated."""
    statuses = []
    async with client(ingress(p="a")) as c:
        for depth in (10, *range(100, 136), 400):
            schema: dict[str, Any] = {"type": "string"}
            for _ in range(depth):
                schema = {"type": "object", "properties": {"a": schema}}
            tool = {"type": "function", "name": "f", "parameters": schema}
            response = await c.post(tools=[tool], tool_choice=choice, stream=stream)
            statuses.append(response.status_code)
            if response.status_code == 200 and stream:
                assert events_in(response.content)[-1]["response"]["tools"][0]["parameters"] == schema
            elif response.status_code == 200:
                assert response.json()["tools"][0]["parameters"] == schema
            else:
                assert response.json()["error"]["param"] == "tools[0].parameters"
    num_fine = statuses.count(200)
    assert statuses == [200] * num_fine + [400] * (len(statuses) - num_fine)
    assert 1 < num_fine < len(statuses) - 1


@pytest.mark.parametrize(
    ("effort", "given", "variables"),
    [
        (None, {}, {}),
        ("low", {}, {"reasoning_effort": "low"}),
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False}),
        ("none", {"enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}),
        ("high", {"reasoning_effort": "max", "a": 1}, {"reasoning_effort": "max", "a": 1}),
    ],
)
async def test_reasoning_effort_is_for_the_template(
    effort: str | None, given: dict[str, Any], variables: dict[str, Any]
) -> None:
    """In both endpoints, each under its own name."""
    async with client(ingress(p="a")) as c:
        response = await c.whole(reasoning={"effort": effort}, chat_template_kwargs=given)
        assert response["reasoning"] == {"effort": effort, "summary": None}
        body = {"messages": [{"role": "user", "content": "p"}], "reasoning_effort": effort}
        chat = await c.http.post("/v1/chat/completions", json=body | {"chat_template_kwargs": given})
        assert chat.status_code == 200, chat.text
        for _, options in c.ingress.tokenizer.rendered:
            assert options is not None
            assert options.variables == variables


class City(BaseModel):
    name: str
    people: int


async def test_parse() -> None:
    """The client's own helper: its schema reaches the engine as a grammar, the text comes back as an object."""
    app = ingress(p='{"name": "Rome", "people": 3}')
    transport = httpx2.ASGITransport(app=app.app(), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        c = official(http)
        parsed = await c.responses.parse(model=MODEL, input="p", text_format=City)
        assert parsed.output_parsed == City(name="Rome", people=3)
        async with c.responses.stream(model=MODEL, input="p", text_format=City) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == City(name="Rome", people=3)
    plain, streamed = [spec.grammar for spec in app.source.specs]
    assert plain is not None
    assert plain == streamed
    assert "people" in plain.text


async def test_parse_of_tools_and_streamed_calls() -> None:
    app = ingress(p=ANSWER)
    transport = httpx2.ASGITransport(app=app.app(), raise_app_exceptions=False)
    tool = openai.pydantic_function_tool(City, name="get_weather")["function"]
    offered = {"type": "function", **tool}
    async with httpx2.AsyncClient(transport=transport) as http:
        c = official(http)
        parsed = await c.responses.parse(model=MODEL, input="p", tools=[offered])
        assert [item.type for item in parsed.output] == [kind for kind, _ in ITEMS]
        assert parsed.output[3].parsed_arguments == {"city": "Rome"}
        async with c.responses.stream(model=MODEL, input="p", tools=[offered]) as stream:
            snapshots = {
                event.output_index: event.snapshot
                async for event in stream
                if event.type == "response.function_call_arguments.delta"
            }
            final = await stream.get_final_response()
        assert snapshots == dict(enumerate(ARGUMENTS, 2))
        assert [item.type for item in final.output] == [kind for kind, _ in ITEMS]


async def test_json_mode() -> None:
    async with client(ingress(p="{}")) as c:
        response = await c.whole(text={"format": {"type": "json_object"}})
        assert response["text"]["format"] == {"type": "json_object"}
        assert c.ingress.source.specs[0].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER | {"name": "g", "parameters": {"type": "object", "not": {}}}],
          "tool_choice": "required"}, "tools[1].parameters"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ],
)  # fmt: skip
async def test_what_the_chat_path_refuses_is_named_as_here(fields: dict[str, Any], param: str) -> None:
    async with client(ingress()) as c:
        response = await Client(c.ingress, c.http).post(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert error["message"].startswith(param), error
        for word in ("response_format", "function.", "messages"):
            assert word not in error["message"], error
