"""Fields that say what an answer must look like: their types, what goes together, and what they ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.config.limits import LimitsConfig
from cluster.grammars.grammar_source import GrammarSource
from cluster.openai.body import parse_body
from cluster.openai.request import CompletionBody
from tests.cluster.test_openai_api import chat, completion, refused_field

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'


def response_format(**of_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **of_schema}}


@pytest.mark.parametrize(
    ("fields", "field", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", GrammarSource("json_object", "")),
        *(
            (
                {"response_format": response_format(**more)},
                "response_format.json_schema.schema",
                GrammarSource("json_schema", SCHEMA_TEXT, is_lenient),
            )
            for more, is_lenient in (({}, False), ({"strict": True}, False), ({"strict": False}, True))
        ),
        (
            {"response_format": response_format(strict=None, description="x", unheard_of=1)},
            "response_format.json_schema.schema",
            GrammarSource("json_schema", SCHEMA_TEXT),
        ),
        *(
            ({name: value}, name, GrammarSource(kind, text))
            for name, value, kind, text in (
                ("guided_json", SCHEMA, "json_schema", SCHEMA_TEXT),
                ("guided_json", json.dumps(SCHEMA, indent=1), "json_schema", SCHEMA_TEXT),
                ("guided_regex", "a|ö", "regex", "a|ö"),
                ("guided_choice", ["ja", "nö"], "choice", '["ja","nö"]'),
                ("guided_grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
            )
        ),
        *(
            ({"structured_outputs": {name: value}}, f"structured_outputs.{name}", GrammarSource(kind, text))
            for name, value, kind, text in (
                ("json", SCHEMA, "json_schema", SCHEMA_TEXT),
                ("json", SCHEMA_TEXT, "json_schema", SCHEMA_TEXT),
                ("regex", "a", "regex", "a"),
                ("choice", ["a"], "choice", '["a"]'),
                ("grammar", 'start: "a"', "grammar", 'start: "a"'),
                ("json_object", True, "json_object", ""),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for(fields: dict[str, Any], field: str, source: GrammarSource) -> None:
    for body in (chat(**fields), completion(**fields)):
        assert body.answer_format == (field, source)
        assert body.unknown_fields == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "regex": None, "disable_fallback": True}},
        {"structured_outputs": {"disable_any_whitespace": False, "disable_additional_properties": False}},
        {"guided_decoding_backend": "xgrammar"},
    ],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    for body in (chat(**fields), completion(**fields)):
        assert body.answer_format is None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": "json_object"}),
        ("response_format.type", {"response_format": {}}),
        ("response_format.type", {"response_format": {"type": "structural_tag"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema", "json_schema": []}}),
        ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("response_format.json_schema.name", {"response_format": response_format(name="not one")}),
        ("response_format.json_schema.name", {"response_format": response_format(name="x" * 65)}),
        ("response_format.json_schema.schema", {"response_format": response_format(schema=None)}),
        ("response_format.json_schema.schema", {"response_format": response_format(schema=SCHEMA_TEXT)}),
        ("response_format.json_schema.schema", {"response_format": response_format(schema=True)}),
        ("response_format.json_schema.strict", {"response_format": response_format(strict="true")}),
        ("response_format.json_schema.description", {"response_format": response_format(description=1)}),
        ("structured_outputs", {"structured_outputs": "a"}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs.jsn", {"structured_outputs": {"jsn": SCHEMA}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "[]"}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.json_object", {"structured_outputs": {"json_object": False}}),
        ("structured_outputs.json_object", {"structured_outputs": {"json_object": 1}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
        (
            "structured_outputs.disable_any_whitespace",
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        ),
        (
            "structured_outputs.disable_additional_properties",
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        ),
        ("guided_json", {"guided_json": 1}),
        ("guided_json", {"guided_json": "nothing"}),
        ("guided_json", {"guided_json": [SCHEMA]}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_regex", {"guided_regex": ["a"]}),
        ("guided_choice", {"guided_choice": "a"}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice", {"guided_choice": [""]}),
        ("guided_choice", {"guided_choice": ["a", 1]}),
        ("guided_choice", {"guided_choice": ["a"] * 1_001}),
        ("guided_grammar", {"guided_grammar": ""}),
        ("guided_decoding_backend", {"guided_decoding_backend": 1}),
        ("guided_regex", {"guided_json": SCHEMA, "guided_regex": "a"}),
        ("guided_choice", {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}),
        ("structured_outputs.regex", {"response_format": response_format(), "structured_outputs": {"regex": "a"}}),
    ],
)
def test_wrong_ones_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    assert refused_field(param, **fields)


def test_text_beside_another_one_is_fine() -> None:
    assert chat(response_format={"type": "text"}, guided_regex="a").answer_format == (
        "guided_regex",
        GrammarSource("regex", "a"),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {"description": "x" * 70_000}),
        ("guided_json", json.dumps({"description": "x" * 70_000})),
        ("guided_regex", "ö" * 33_000),
        ("guided_choice", ["x" * 100] * 700),
        ("guided_grammar", "x" * 70_000),
    ],
)
def test_what_is_too_large_is_refused_with_the_number(name: str, value: Any) -> None:
    assert str(LimitsConfig().max_grammar_bytes) in refused_field(name, **{name: value})


def test_limits_are_those_of_the_config() -> None:
    limits = LimitsConfig(max_grammar_bytes=64, max_enum_values=2)
    for fields in ({"guided_regex": "a" * 64}, {"guided_choice": ["a", "b"]}):
        raw = json.dumps({"prompt": "a", **fields}).encode()
        assert parse_body(raw, None, CompletionBody, limits).answer_format is not None
    for fields in ({"guided_regex": "a" * 65}, {"guided_choice": ["a", "b", "c"]}):
        with pytest.raises(Exception, match="at most"):
            parse_body(json.dumps({"prompt": "a", **fields}).encode(), None, CompletionBody, limits)


def test_a_schema_that_is_nested_too_deeply_for_json_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    assert "deep" in refused_field("guided_json", guided_json=schema)


def test_beam_search_follows_no_grammar() -> None:
    assert "use_beam_search" in refused_field("guided_regex", guided_regex="a", use_beam_search=True)
    assert "use_beam_search" in refused_field(
        "response_format", response_format={"type": "json_object"}, use_beam_search=True, n=2
    )
    assert completion(response_format={"type": "text"}, use_beam_search=True).answer_format is None


def test_all_else_goes_together_with_it() -> None:
    more = {
        "n": 2,
        "seed": 1,
        "stop": "x",
        "logprobs": 1,
        "presence_penalty": 1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stream": True,
        "logit_bias": {"1": 1},
        "allowed_token_ids": [1],
        "bad_words": ["x"],
    }
    assert completion(guided_regex="a", **more).answer_format is not None
    assert completion(guided_regex="a", best_of=2, echo=True, prompt=["a", "b"]).answer_format is not None
