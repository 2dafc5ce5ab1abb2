"""What the grammars of calls let a model write: an engine that draws anything they allow, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.config.limits import LimitsConfig
from cluster.grammars.source_bounds import GrammarBounds
from cluster.same_names import by_names
from tests.cluster.answer_families import TEMPLATES
from tests.cluster.fake_ingress import ByteCompiler, ByteTokenizer, FakeIngress
from tests.cluster.following_source import FollowingSource
from tests.cluster.test_chat_tools import _PLAIN, _SPECIAL, Client, tokenizer_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"weather": SCHEMA, "time": NOTHING}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [12]}}}
NAMED = {"type": "function", "function": {"name": "time"}}
FAMILIES = [name for name in TEMPLATES if name != "plain"]
COMPILERS: list[ByteCompiler] = []


@pytest.fixture(scope="module", autouse=True)
def compilers() -> Iterator[None]:
    COMPILERS.append(ByteCompiler(by_names(GrammarBounds, LimitsConfig()), _SPECIAL, _PLAIN))
    yield
    COMPILERS.pop().close()


@asynccontextmanager
async def client(
    family: str | ByteTokenizer, begins: str | list[int] = "", seed: int = 0, parser: str = "auto", **limits: int
) -> AsyncIterator[tuple[Client, FollowingSource]]:
    """begins: what the model would write first, markers as tokens."""
    tokenizer = tokenizer_of(family) if isinstance(family, str) else family
    source = FollowingSource(tokenizer, ids_of(tokenizer, begins) if isinstance(begins, str) else begins, seed)
    ingress = FakeIngress(source, tokenizer=tokenizer, parser=parser, compiler=COMPILERS[0], **limits)
    transport = httpx.ASGITransport(app=ingress.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield Client(ingress, http), source


def ids_of(tokenizer: ByteTokenizer, text: str) -> list[int]:
    pattern = "|".join(map(re.escape, tokenizer.added_ids))
    pieces = [piece for piece in re.split(f"({pattern})", text) if piece]
    return [id_ for p in pieces for id_ in ([tokenizer.added_ids[p]] if p in tokenizer.added_ids else p.encode())]


def valid_calls(choice: dict[str, Any]) -> list[str]:
    """Names of the calls; all are valid."""
    assert choice["finish_reason"] == "tool_calls", choice
    names = []
    for call in choice["message"]["tool_calls"]:
        names.append(call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[names[-1]])
    return names


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_that_are_required_are_valid_in_each_familys_way(family: str) -> None:
    seen: set[str] = set()
    async with client(family, "I do not want to call.") as (c, _):
        for fields in ({"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}) * 3:
            for stream in (False, True):
                (choice,) = (await c.whole(stream, tools=TOOLS, max_tokens=420, **fields))["choices"]
                if choice["finish_reason"] == "length":
                    continue  # chance has drawn many of them
                names = valid_calls(choice)
                assert choice["message"]["content"] is None
                assert len(names) == 1 or "parallel_tool_calls" not in fields
                seen |= set(names)
        (choice,) = (await c.whole(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False))["choices"]
        assert valid_calls(choice) == ["time"]
    assert seen


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral_named", "deepseek_v31", "qwen3_coder"])
async def test_with_auto_a_call_that_the_model_begins_goes_on_as_one(family: str) -> None:
    openers = {"deepseek_v31": "<｜tool▁calls▁begin｜>", "hermes": "<tool_call>", "qwen3_coder": "<tool_call>"}
    opener = openers.get(family, "[TOOL_CALLS]")
    tools = TOOLS[1:] if family == "qwen3_coder" else TOOLS  # chance would not end a text up to a tag
    for seed in range(3):
        async with client(family, f"Hm. {opener}Hello there", seed) as (c, source):
            (choice,) = (await c.whole(tools=tools, parallel_tool_calls=False))["choices"]
            grammar = source.specs[0].grammar
            assert grammar is not None
            assert (grammar.begins_after, grammar.repeats) == ((c.ingress.tokenizer.added_ids[opener],), False)
            assert choice["message"]["content"] == "Hm."
            assert len(valid_calls(choice)) == 1
    async with client(family, "Hello there") as (c, source):
        (choice,) = (await c.whole(tools=TOOLS, max_tokens=11))["choices"]
        assert choice["message"]["content"] == "Hello there"  # free, where no call begins
        assert source.specs[0].grammar is not None
        assert source.specs[0].grammar.repeats


@pytest.mark.parametrize(("begins", "calls"), [("<tool_call>", True), ("12", False), ("Hello", None)])
async def test_with_auto_and_a_format_an_answer_is_one_or_the_other(begins: str, calls: bool | None) -> None:
    async with client("hermes", begins) as (c, source):
        (choice,) = (await c.whole(tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False))["choices"]
        grammar = source.specs[0].grammar
        assert grammar is not None
        assert grammar.begins_after == ()
        if calls or (calls is None and choice["message"].get("tool_calls")):
            assert valid_calls(choice)
        else:
            assert (choice["message"]["content"], choice["finish_reason"]) == ("12", "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'start: "1" two\ntwo: "2"'},
        {"guided_grammar": 'root ::= "1" two\ntwo ::= "2"'},
        {"guided_regex": "12"},
        {"guided_choice": ["12"]},
        {"guided_json": {"const": 12}},
        {"structured_outputs": {"grammar": '%llguidance {}\nstart: "1" /2/'}},
    ],
)
@pytest.mark.parametrize(("parser", "begins"), [("auto", "12"), ("qwen3", "<think>Hm</think>12")])
async def test_every_form_goes_with_tools_and_with_thinking(parser: str, begins: str, fields: dict[str, Any]) -> None:
    for tools in (TOOLS, []):
        async with client("hermes", begins, parser=parser) as (c, _):
            (choice,) = (await c.whole(**fields, **({"tools": tools} if tools else {})))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("12", "stop")


async def test_a_grammar_is_lark_and_not_what_it_is_made_into() -> None:
    made = json.dumps({"grammars": [{"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}]})
    async with client("hermes") as (c, _):
        response = await c.post(guided_grammar=made)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_refused")


async def test_with_none_only_the_format_counts_and_with_required_only_calls() -> None:
    async with client("hermes", "<tool_call>") as (c, _):
        (choice,) = (await c.whole(tools=TOOLS, response_format=FORMAT, tool_choice="none"))["choices"]
        assert choice["message"]["content"] == "12"
        fields = {"tool_choice": NAMED, "parallel_tool_calls": False}
        (choice,) = (await c.whole(tools=TOOLS, response_format=FORMAT, **fields))["choices"]
        assert valid_calls(choice) == ["time"]


@pytest.mark.parametrize("fields", [{"tool_choice": NAMED, "tools": TOOLS, "parallel_tool_calls": False}, {}])
@pytest.mark.parametrize(
    ("prompt", "begins", "reasoning"),
    [
        ("p", "<think>\nHm.</think>", "Hm."),  # the model thinks
        ("p", "", None),  # it does not, and is held to the grammar all the same
        ("p<think>", "Hm {</think>", "Hm {"),
        ("p<think>\n\n</think>\n\n", "<think>", None),  # it shall not
    ],
)
async def test_the_grammar_begins_behind_what_the_model_thinks(
    prompt: str, begins: str, reasoning: str | None, fields: dict[str, Any]
) -> None:
    answer = "<tool_call>!" if fields else "12"
    async with client("qwen3", begins or answer) as (c, source):
        messages = [{"role": "user", "content": prompt}]
        (choice,) = (await c.whole(messages=messages, response_format=FORMAT, **fields))["choices"]
        assert choice["message"].get("reasoning") == reasoning
        if fields:
            assert valid_calls(choice) == ["time"]
        else:
            assert choice["message"]["content"].strip() == "12"
        grammar = source.specs[0].grammar
        assert grammar is not None
        closer = c.ingress.tokenizer.added_ids["</think>"]
        assert grammar.begins_after == ((closer,) if prompt == "p<think>" else ())


async def test_what_cannot_be_enforced_is_refused_for_strict_functions_only() -> None:
    hard: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    for choice in ("auto", "required"):
        async with client("hermes", "<tool_call>") as (c, _):
            tools = [TOOLS[1], {"type": "function", "function": {"name": "hard", "parameters": hard, "strict": True}}]
            response = await c.post(tools=tools, tool_choice=choice)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
            assert error["code"] == "grammar_refused"
            assert "not" in error["message"]
            assert c.ingress.samples("splitserve_unenforced_tools") == 0
            del tools[1]["function"]["strict"]
            response = await c.post(tools=tools[1:], tool_choice=choice, parallel_tool_calls=False, max_tokens=450)
            assert response.status_code == 200
            assert c.ingress.samples("splitserve_unenforced_tools") == 1
            (answer,) = response.json()["choices"]
            if answer["finish_reason"] == "tool_calls":
                assert isinstance(json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]), dict)


def many_tools(**function: Any) -> list[dict[str, Any]]:
    schemas: list[Any] = [{"type": "object", "properties": {f"argument_{i}": {"enum": [i]}}} for i in range(10)]
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema, **function}}
        for i, schema in enumerate(schemas)
    ]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tools_that_are_too_much_together_take_any_arguments_unless_they_are_strict(choice: str) -> None:
    async with client("hermes", "<tool_call>", max_grammar_bytes=200) as (c, source):
        response = await c.post(tools=many_tools(), tool_choice=choice, max_tokens=5)
        assert response.status_code == 200
        assert c.ingress.samples("splitserve_unenforced_tools") == 1
        grammar = source.specs[0].grammar
        assert grammar is not None
        assert "f9" in grammar.text
        assert "argument_9" not in grammar.text
        response = await c.post(tools=many_tools(strict=True), tool_choice=choice)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    async with client("hermes", "<tool_call>") as (c, source):
        assert (await c.post(tools=many_tools(), tool_choice=choice, max_tokens=5)).status_code == 200
        grammar = source.specs[0].grammar
        assert grammar is not None
        assert "argument_9" in grammar.text


async def test_a_format_beside_tools_whose_calls_nobody_knows_is_refused() -> None:
    tokenizer = ByteTokenizer("{% if tools %}{{ tools }}{% endif %}", _SPECIAL, _PLAIN)
    async with client(tokenizer) as (c, _):
        response = await c.post(tools=TOOLS, response_format=FORMAT)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported")
        assert error["param"] == "response_format.json_schema.schema"
        for choice in ("none", NAMED):
            assert (await c.post(tools=TOOLS, response_format=FORMAT, tool_choice=choice)).status_code == 200


async def test_beside_a_format_calls_are_read_as_the_grammar_has_them_written() -> None:
    """Whatever the checkpoint's own response template says."""
    tokenizer = tokenizer_of("hermes")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "p",
        "fields": {"content": {"content": "text"}},
    }
    async with client(tokenizer, "<tool_call>") as (c, source):
        fields: dict[str, Any] = {"tools": TOOLS[1:], "response_format": FORMAT, "parallel_tool_calls": False}
        (choice,) = (await c.whole(**fields))["choices"]
        assert valid_calls(choice) == ["time"]
        assert (await c.post(tools=TOOLS, max_tokens=3)).status_code == 200
        assert source.specs[1].grammar is None  # its own template: nobody knows how it opens a call


async def test_calls_are_forced_from_models_whose_template_shows_no_tools() -> None:
    async with client("plain", "Hello") as (c, source):
        (choice,) = (await c.whole(tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False))["choices"]
        assert valid_calls(choice) == ["time"]
        assert c.ingress.samples("splitserve_unseen_tools") == 1
        (choice,) = (await c.whole(tools=TOOLS, max_tokens=5))["choices"]  # auto: the model knows of none
        assert choice["message"]["content"] == "Hello"
        assert source.specs[1].grammar is None
        assert c.ingress.samples("splitserve_unseen_tools") == 2


async def test_arguments_are_those_that_the_function_names_unless_its_schema_is_open() -> None:
    closed: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}}
    for schema, is_open in (
        (closed, False),
        ({"properties": {"a": {"enum": [1]}}}, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object"}, True),
        (closed | {"additionalProperties": True}, True),
        (closed | {"patternProperties": {"^b": {"enum": [2]}}}, True),
        ({"anyOf": [closed, {"type": "object", "properties": {"b": {"enum": [2]}}}]}, True),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        async with client("hermes", '<tool_call>\n{"name": "f", "arguments": {"b') as (c, _):
            response = await c.post(tools=tools, tool_choice="required", parallel_tool_calls=False)
            call = response.json()["choices"][0]["message"]["tool_calls"][0]["function"]
            assert call["arguments"].startswith('{"b') == is_open, schema


async def test_beams_follow_no_grammar_and_may_call_as_they_like() -> None:
    async with client("hermes") as (c, _):
        response = await c.post(tools=TOOLS, tool_choice="required", use_beam_search=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


async def test_ignore_eos_goes_on_behind_calls_that_nobody_asked_for() -> None:
    async with client("hermes", "Hello") as (c, source):
        await c.whole(tools=TOOLS, ignore_eos=True, max_tokens=5)
        assert source.specs[0].stop_token_ids == frozenset()
        await c.whole(tools=TOOLS, ignore_eos=True, tool_choice="required")
        assert source.specs[1].stop_token_ids == c.ingress.tokenizer.eos_token_ids


IN_TAGS: dict[str, Any] = {
    "unit": {"enum": ["C", 'say "F"\n', ""]},
    "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
    "const": {"const": "x"},
    "color": {"$ref": "#/$defs/color"},
    "day": {"$ref": "#/$defs/day"},
    "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"type": "null"}]},
    "mixed": {"enum": ["one", 2]},
    "number": {"enum": [1, 2.5, None, True]},
}


@pytest.mark.parametrize("name", IN_TAGS)
async def test_values_in_tags_are_what_their_schema_says(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: IN_TAGS[name]},
        "required": [name],
        "$defs": {"color": {"enum": ["red", "<green>"]}, "day": {"type": "integer", "minimum": 1, "maximum": 7}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(6):
        async with client("qwen3_coder", seed=seed) as (c, _):
            (choice,) = (await c.whole(seed % 2 == 0, **fields))["choices"]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize(
    ("properties", "word"),
    [
        ({"a": {"type": "string", "pattern": "^b$"}}, "pattern"),
        ({"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}, "maxLength"),
        ({"a>b": {"const": 1}}, "a>b"),
        ({" a": {"const": 1}}, "' a'"),
    ],
)
async def test_what_tags_can_not_say_is_refused_where_it_is_strict(properties: dict[str, Any], word: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}, "strict": True}
    async with client("qwen3_coder") as (c, _):
        response = await c.post(tools=[{"type": "function", "function": function}], tool_choice="required")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "grammar_refused")
        assert word in error["message"]


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], ["object", "null"], None])
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
async def test_arguments_are_an_object_whatever_a_schema_says(family: str, kind: Any) -> None:
    schema = {"type": kind, "maxProperties": 0, "properties": {}, "additionalProperties": False}
    function = {"name": "f", "parameters": schema}
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    async with client(family) as (c, _):
        (choice,) = (await c.whole(tools=[{"type": "function", "function": function}], **fields))["choices"]
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        else:
            assert choice["finish_reason"] == "length"
        strict = [{"type": "function", "function": {**function, "strict": True}}]
        response = await c.post(tools=strict, tool_choice="required")
        assert response.status_code == (200 if "object" in (kind or "") else 400), response.text
