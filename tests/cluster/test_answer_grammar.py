"""Requests whose answers must follow something: what the engines are told, and what is refused before any header."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.grammars.grammar_compiler import CompilerBusy, CompilerUnavailable
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.known_grammars import KnownGrammars
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.openai.answer_grammar import AnswerGrammars
from scheduler.grammar import Grammar
from tests.cluster.api_client import CHAT, TEXT, ApiClient, api_client
from tests.cluster.fake_ingress import EOS
from tests.cluster.test_openai_api import completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOT_FOLLOWED = {"type": "object", "not": {"required": ["b"]}}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_regex": "[a-z]+"},
    {"guided_choice": ["ja", 'ne"in', "n\\ö\n"]},
    {"guided_grammar": 'start: "a" | "b"'},
    {"guided_grammar": 'root ::= "a" | [0-9]+'},
]


async def grammars_of(c: ApiClient, path: str, fields: dict[str, Any]) -> list[Grammar | None]:
    """What the engines were told."""
    before = len(c.ingress.source.specs)
    response = await c.send(path, {"max_tokens": 3, **fields})
    assert response.status_code == 200, response.text
    return [spec.grammar for spec in c.ingress.source.specs[before:]]


async def test_each_form_reaches_the_engines_as_a_grammar() -> None:
    async with api_client() as c:
        texts = set()
        for fields in FORMS:
            for path in (CHAT, TEXT):
                (grammar,) = await grammars_of(c, path, fields)
                assert grammar is not None
                assert (grammar.begins_after, grammar.repeats) == ((), False)
                texts.add(grammar.text)
        assert len(texts) == len(FORMS) - 3  # three say what others have said
        assert await grammars_of(c, CHAT, {"response_format": {"type": "text"}}) == [None]
        assert await grammars_of(c, TEXT, {"prompt": ["a", "b"]}) == [None, None]
        first, second = await grammars_of(c, TEXT, {"prompt": ["a", "b"], "guided_regex": "a", "n": 2})
        assert first == second is not None


async def test_the_models_end_counts_whatever_else_is_asked_for() -> None:
    async with api_client() as c:
        for fields, ends in (
            ({"ignore_eos": True}, set()),
            ({"ignore_eos": True, "guided_regex": "a"}, {EOS}),
            ({"ignore_eos": True, "guided_regex": "a", "stop_token_ids": [7]}, {EOS, 7}),
            ({"guided_regex": "a"}, {EOS}),
        ):
            assert (await c.send(TEXT, fields)).status_code == 200
            assert c.ingress.source.specs[-1].stop_token_ids == ends


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": NOT_FOLLOWED}, "guided_json", 'not supported: "not"'),
    ({"structured_outputs": {"json": NOT_FOLLOWED}}, "structured_outputs.json", 'not supported: "not"'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NOT_FOLLOWED}}},
        "response_format.json_schema.schema",
        'not supported: "not"',
    ),
    ({"guided_json": {"type": "string", "format": "iri"}}, "guided_json", "not supported: iri"),
    ({"guided_json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "guided_json", "oneOf"),
    ({"guided_json": {"$ref": "http://127.0.0.1:1/a"}}, "guided_json", "leads out of it"),
    ({"guided_json": {"$ref": "#/$defs/a", "$id": "a"}}, "guided_json", "$id beside $ref"),
    ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    ({"guided_json": {"properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}}}, "guided_json", "x-guid"),
    ({"guided_regex": "["}, "guided_regex", "unclosed"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text at all"),
    ({"guided_json": {"const": 2**53 + 1}}, "guided_json", "too large to be followed exactly: 9007199254740993"),
    ({"guided_json": {"enum": [1, {"a": [-(10**30)]}]}}, "guided_json", "too large to be followed exactly"),
    ({"guided_json": {"items": {"minimum": 2**60 + 1}}}, "guided_json", "too large to be followed exactly"),
    ({"guided_json": {"maximum": 2**63}}, "guided_json", "too large to be followed exactly"),
    ({"guided_json": {"minimum": -(2**63)}}, "guided_json", "too large to be followed exactly"),
    ({"guided_json": {"minimum": -(10**30)}}, "guided_json", "too large to be followed exactly"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
    ({"guided_grammar": "nonsense"}, "guided_grammar", ""),
    ({"guided_grammar": 'start: a\na[temperature=0.5]: "b"'}, "guided_grammar", "temperature"),
    ({"guided_grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, "guided_grammar", "not"),
    ({"guided_grammar": "root ::= other"}, "guided_grammar", "other"),
    ({"guided_grammar": "root ::= ["}, "guided_grammar", "GBNF"),
]


async def test_a40_a41_what_is_not_followed_is_refused_by_name_and_nobody_else_notices() -> None:
    async with api_client() as c:
        good = await grammars_of(c, CHAT, {"guided_regex": "^(.*)$"})
        for fields, param, word in REFUSED:
            for path in (CHAT, TEXT):
                for stream in (False, True):
                    response = await c.send(path, fields, stream=stream)
                    error = response.json()["error"]
                    assert (response.status_code, error["param"], error["code"]) == (400, param, "grammar_refused")
                    assert error["message"].startswith(f"{param} ")
                    assert word in error["message"]
                    assert len(error["message"]) < 600
            assert await grammars_of(c, CHAT, {"guided_regex": "^(.*)$"}) == good
        assert c.ingress.samples("splitserve_grammar_refusals", reason="refused") == 4 * len(REFUSED)
        num_sources = len(REFUSED) + 1 - 2  # three of them say the same
        assert c.ingress.samples("splitserve_grammar_checks", result="new") == num_sources
        assert c.ingress.samples("splitserve_grammar_check_seconds", "_count") == num_sources


async def test_numbers_that_are_followed_exactly_are_followed() -> None:
    fine = {
        "default": 10**30,
        "properties": {
            "a": {"enum": [2**53, -(2**53), True, None, 0.1, 1e15]},
            "b": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
            "c": {"type": "integer", "minimum": -(2**62), "maximum": 2**53 - 1},
            "d": {"type": "integer", "exclusiveMaximum": 5},
        },
    }
    async with api_client() as c:
        (grammar,) = await grammars_of(c, CHAT, {"guided_json": fine})
        assert grammar is not None


async def test_bounds_of_the_config_are_named() -> None:
    limits = {"max_grammar_depth": 4, "max_schema_properties": 2, "max_grammar_patterns": 1, "max_enum_values": 3}
    fine: dict[str, Any] = {
        "properties": {"a": {"enum": [1, 2, 3]}, "properties": {"pattern": "a"}},
        "default": {"properties": {"x": 1, "y": 2, "z": 3}},
    }
    async with api_client(None, **limits) as c:
        assert await grammars_of(c, CHAT, {"guided_json": fine}) != [None]
        for schema, words in (
            ({"items": {"items": {"items": {"items": {}}}}}, "more than 4 levels"),
            ({**fine, "properties": dict.fromkeys("abc", True)}, "3 properties; at most 2"),
            ({**fine, "required": ["a", "b", "c"]}, "3 properties; at most 2"),
            ({**fine, "items": {"pattern": "b"}}, "2 patterns; at most 1"),
            ({**fine, "patternProperties": {"b": {}}}, "2 patterns; at most 1"),
            ({**fine, "anyOf": [{"enum": [4]}]}, "4 enum values; at most 3"),
        ):
            response = await c.send(CHAT, {"guided_json": schema})
            assert response.status_code == 400
            assert words in response.json()["error"]["message"], response.text


async def test_a_format_that_nobody_knows_says_nothing_where_the_client_is_not_strict() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "iri"}, "format": {"type": "string", "format": "date"}},
        "enum": [{"format": "iri"}],
        "required": ["a"],
    }
    del schema["enum"]
    async with api_client() as c:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": False}}
        (lenient,) = await grammars_of(c, CHAT, {"response_format": form})
        assert lenient is not None
        assert "iri" not in lenient.text
        form["json_schema"]["strict"] = True  # type: ignore[index]
        response = await c.send(CHAT, {"response_format": form})
        assert "iri" in response.json()["error"]["message"]
        for wrong in (1, [], {}, True):
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"format": wrong}, "strict": False}}
            response = await c.send(CHAT, {"response_format": form})
            assert (response.status_code, "work" in response.text) == (400, False), response.text


async def test_other_keywords_are_refused_however_lenient_the_client_is() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": NOT_FOLLOWED, "strict": False}}
    async with api_client() as c:
        assert "not" in (await c.send(CHAT, {"response_format": form})).json()["error"]["message"]


# -- the noun itself -------------------------------------------------------------------------------


class StubCompiler:
    def __init__(self, outcome: str | Exception) -> None:
        self.outcome = outcome

    async def compile(self, source: GrammarSource, client: str) -> str:
        await asyncio.sleep(0)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def test_a_compiler_that_is_away_is_no_fault_of_the_client() -> None:
    stub, metrics = StubCompiler(CompilerUnavailable("x")), IngressMetrics("m", "1", "2")
    grammars = AnswerGrammars(KnownGrammars(stub, metrics))
    with pytest.raises(ApiError) as caught:
        await grammars.of(completion(guided_regex="a"))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "unavailable", 1.0)
    stub.outcome = CompilerBusy("x")
    with pytest.raises(ApiError) as caught:
        await grammars.of(completion(guided_regex="a"))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 10.0)
    stub.outcome = "text"
    assert await grammars.of(completion(guided_regex="a")) == Grammar("text")
