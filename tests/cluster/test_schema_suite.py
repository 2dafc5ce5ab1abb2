"""The JSON Schema Test Suite, through what requests go through: what a schema allows can be written, nothing else can,
and what is not followed is refused by its keyword."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from llguidance import LLTokenizer

from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.refusal_words import in_our_words
from cluster.grammars.source_bounds import GrammarBounds, SourceRefused
from cluster.grammars.source_text import KNOWN_FORMATS, grammar_text
from replicas.grammars.compiled_grammar import CompiledGrammar, GrammarRefused, compile_grammar
from replicas.grammars.grammar_fuel import GrammarFuel
from tests.model_folder import model_folder

SUITE = json.loads((Path(__file__).parent.parent / "golden" / "json_schema_suite.json").read_text())
BOUNDS = GrammarBounds(32, 500, 64, 1_000, 1.0)
# A format counts here, as with OpenAI; the suite's required part takes it for a remark.
WITH_FORMATS = "format"
# Keywords that are not followed. Each schema that is refused has one of these, and the refusal names it.
REFUSED_KEYWORDS = {
    *("$dynamicRef", "$dynamicAnchor", "contains", "dependentRequired", "dependentSchemas", "if", "then", "else"),
    *("maxContains", "minContains", "not", "oneOf", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("uniqueItems", "format", "multipleOf", "patternProperties", "$ref", "$schema"),
}
OF_ALL = "https://json-schema.org/draft/2020-12/schema"
# Why else: a bound that is written as 2.0, and numbers with more digits than are followed.
REFUSED_VALUES = ("Expected positive integer for '", "has too many digits")


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((Path(model_folder()) / "tokenizer.json").read_text(), eos_token=[2])


Compile = Callable[..., CompiledGrammar]


@pytest.fixture(scope="module")
def compiled(tokenizer: LLTokenizer) -> Compile:
    def compile_(schema: Any, is_lenient: bool = False) -> CompiledGrammar:
        source = GrammarSource("json_schema", orjson.dumps(schema).decode(), is_lenient)
        return compile_grammar(tokenizer, grammar_text(source, BOUNDS, {}), GrammarFuel())

    return compile_


def accepts(tokenizer: LLTokenizer, grammar: CompiledGrammar, text: str) -> bool:
    matcher, ids = grammar.start(), tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(value: Any) -> Iterator[str]:
    """A value as JSON, in some orders of its keys; whole numbers as such."""
    for ordered in itertools.islice(_orders(value), 200):
        yield json.dumps(ordered, separators=(",", ":"), ensure_ascii=False)
        yield json.dumps(ordered, separators=(", ", ": "))
        yield json.dumps(ordered, indent=2, ensure_ascii=False)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for values in itertools.product(*(list(_orders(item)) for item in value.values())):
            for pairs in itertools.permutations(zip(value, values, strict=True)):
                yield dict(pairs)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(_orders(item)) for item in value)))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def test_the_required_part_of_the_suite(tokenizer: LLTokenizer, compiled: Compile) -> None:
    counts: Counter[str] = Counter()
    for case in SUITE:
        schema, name = case["schema"], (case["file"], case["description"])
        if not isinstance(schema, dict):
            continue  # requests have objects only
        try:
            grammar = compiled(schema)
        except (GrammarRefused, SourceRefused) as refused:
            reason = in_our_words(str(refused))
            if "Unsatisfiable schema" in reason:
                assert not any(is_valid for _, is_valid in case["tests"]), name
                counts["nothing is valid"] += 1
                continue
            # What refers to the schema of all schemas has that one's keywords too.
            having = REFUSED_KEYWORDS & (
                _keys(schema) | ({"$dynamicAnchor"} if OF_ALL in json.dumps(schema) else set())
            )
            assert any(word in reason for word in (*having, *REFUSED_VALUES)), (name, reason)
            counts["refused"] += 1
            continue
        counts["followed"] += 1
        for value, is_valid in case["tests"]:
            if case["file"] == WITH_FORMATS and is_valid and isinstance(value, str):
                continue
            assert any(accepts(tokenizer, grammar, text) for text in written(value)) == is_valid, (name, value)
            counts["valid" if is_valid else "invalid"] += 1
    assert counts["followed"] > 150
    assert counts["valid"] > 330
    assert counts["invalid"] > 220


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return value.keys() | set().union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


# -- what we change ourselves ----------------------------------------------------------------------

TIMES = ["00:00:00Z", "23:59:59Z", "23:59:60Z", "24:00:00Z", "12:60:00Z", "1:00:00Z", "12:00:00", "12:00:00.5Z",
         "12:00:00+23:59", "12:00:00+24:00", "12:00:00.Z", "12:00:00z"]  # fmt: skip


@pytest.mark.parametrize("name", ["date", "time", "date-time"])
def test_dates_and_times_are_those_that_there_are(tokenizer: LLTokenizer, compiled: Compile, name: str) -> None:
    days = ["01", "28", "29", "30", "31", "32", "00"]
    dates = [
        f"{year}-{month:02}-{day}"
        for year in ("1900", "2000", "2023", "2024", "2100", "0400")
        for month in range(14)
        for day in days
    ] + ["2024-1-01", "24-01-01", "2024/01/01", "2024-02-29 "]
    tried = {"date": dates, "time": TIMES, "date-time": [f"{dates[8]}T{t}" for t in TIMES]}
    tried["date-time"] += [f"{date}T{TIMES[0]}" for date in dates] + ["2024-01-01 00:00:00Z", "2024-01-01"]
    grammar = compiled({"type": "string", "format": name})
    is_valid = functools.partial(_is_of_format, name)
    found = {text: accepts(tokenizer, grammar, json.dumps(text)) for text in tried[name]}
    # A leap second and a small z can't be written, though they are valid: whoever reads the answer may not know them.
    assert {text for text in found if found[text] != is_valid(text)} <= {
        text for text in found if ":60Z" in text or text.endswith("z")
    }
    assert {True, False} == set(found.values())


def _is_of_format(name: str, text: str) -> bool:
    import datetime

    day, _, rest = text.partition("T") if name == "date-time" else (text, "", text)
    try:
        if name != "time":
            if len(day) != 10:
                return False
            datetime.datetime.strptime(day, "%Y-%m-%d")
        if name != "date":
            moment = rest.replace("z", "Z").removesuffix("Z")
            if moment == rest.replace("z", "Z") and "+" not in rest and "-" not in rest:
                return False
            if "." in moment and not moment.split(".")[1][:1].isdigit():
                return False
            datetime.time.fromisoformat(f"{moment[:6]}59{moment[8:]}" if moment[6:8] == "60" else moment)
            return len(moment) >= 8 and moment[2] == ":"
    except ValueError:
        return False
    return True


def test_a_format_goes_together_with_other_words(tokenizer: LLTokenizer, compiled: Compile) -> None:
    for more in (
        {"pattern": "^2024"},
        {"allOf": [{"pattern": "^2024"}]},
        {"pattern": "^2", "allOf": [{"pattern": "24-"}]},
    ):
        grammar = compiled({"type": "object", "properties": {"day": {"type": "string", "format": "date", **more}}})
        assert accepts(tokenizer, grammar, '{"day":"2024-02-29"}')
        for day in ("2023-02-28", "2024-02-30"):
            assert not accepts(tokenizer, grammar, json.dumps({"day": day}))
    any_type = compiled({"format": "date"})
    assert accepts(tokenizer, any_type, "7")
    assert accepts(tokenizer, any_type, '"2024-02-29"')
    assert not accepts(tokenizer, any_type, '"2023-02-29"')


def test_known_formats_are_those_that_are_followed(compiled: Compile) -> None:
    for name in KNOWN_FORMATS:
        assert compiled({"type": "string", "format": name})
    others = {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
              "uri-reference", "uri-template", "byte", "int32", "phone", "", "Date"}  # fmt: skip
    for name in others:
        with pytest.raises(GrammarRefused, match="format"):
            compiled({"type": "string", "format": name})
        assert compiled({"type": "string", "format": name}, is_lenient=True)


def test_only_formats_of_schemas_are_left_out_where_the_client_is_not_strict(
    tokenizer: LLTokenizer, compiled: Compile
) -> None:
    schema = {
        "properties": {
            "format": {"type": "string", "format": "iri"},
            "const": {"const": {"format": "iri"}},
            "enum": {"enum": [{"format": "x"}]},
        },
        "required": ["format", "const", "enum"],
    }
    grammar = compiled(schema, is_lenient=True)
    assert accepts(tokenizer, grammar, '{"format":"a","const":{"format":"iri"},"enum":{"format":"x"}}')
    assert not accepts(tokenizer, grammar, '{"format":"a","const":{},"enum":{}}')


def test_schemas_that_pydantic_makes_of_discriminated_unions_are_followed(
    tokenizer: LLTokenizer, compiled: Compile
) -> None:
    from typing import Annotated, Literal

    from pydantic import BaseModel, Field

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int

    class Dog(BaseModel):
        kind: Literal["dog"]
        name: str

    class Owner(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        other: Cat | Dog | None = None

    grammar = compiled(Owner.model_json_schema())
    assert accepts(tokenizer, grammar, '{"pet":{"kind":"cat","lives":9},"other":{"kind":"dog","name":"x"}}')
    assert not accepts(tokenizer, grammar, '{"pet":{"kind":"cat","name":"x"}}')
