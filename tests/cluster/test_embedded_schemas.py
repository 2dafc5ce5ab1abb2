"""Schemas behind %json of a grammar in Lark: bounded and followed as those that come alone, wherever they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.grammars.embedded_schemas import with_embedded_schemas
from cluster.grammars.grammar_compiler import GrammarCompiler
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.source_bounds import SourceRefused
from tests.cluster.byte_tokenizer import EOS, byte_tokenizer_json
from tests.cluster.test_grammar_compiler import settings


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(settings())
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("lark", "refused"),
    [
        ('start: %json {"const": 9007199254740993}', "too large to be followed exactly: 9007199254740993"),
        ('start: a\na: "x" %json {"items": {"maximum": 9223372036854775808}}', "too large to be followed exactly"),
        ('start: %json\n\t{"enum": [1e300]}', "too large to be followed exactly"),
        ('start: %json {"x-guidance": {"lenient": true}, "format": "x"}', "has x-guidance"),
        ('start: %json {"format": "x"}', "has a format that is not supported: x"),
        ('start: %json {"$id": "a", "$ref": "b"}', "has $id beside $ref"),
        ("start: %json " + '{"items":' * 40 + "{}" + "}" * 40, "nested more than 32 levels"),
        ("start: %json " + '{"a":' * 10_000 + "1" + "}" * 10_000, "no JSON: depth limit"),
        ("start: %json " + '{"a":[' * 10_000, "does not end"),
        ('start: %json {"properties": {' + ",".join(f'"p{i}": true' for i in range(501)) + "}}", "has 501 properties"),
        ("start: %json 7", "no schema"),
        ("start: %json [1]", "no schema"),
        ("start: %json", "no schema"),
        ('start: %json {"const": NaN}', "no JSON"),
        ('start: %json {"const"}', "no JSON"),
        ('start: "a\\"%json" %json {"const": 9007199254740993}', "too large"),
        ('start: /"/ %json {"const": 9007199254740993} /"/', "too large"),
        ('start: /a\n"/ %json {"const": 9007199254740993} /"/', "too large"),
        ('start: "a" // it\'s "\n %json {"const": 9007199254740993}', "too large"),
        ('start: <|"|> %json {"const": 9007199254740993} "x"', "too large"),
    ],
)
async def test_what_is_not_followed_is_refused_by_name(compiler: GrammarCompiler, lark: str, refused: str) -> None:
    with pytest.raises(SourceRefused) as caught:
        await compiler.compile(GrammarSource("grammar", lark))
    assert refused in caught.value.reason


@pytest.mark.parametrize(
    ("lark", "good", "bad"),
    [
        ('start: "<" %json {"type": "integer", "maximum": 9} ">"', ["<7>", "<-31>"], ["<10>"]),
        ('start: %json {"format": "date"}', ['"2024-02-29"'], ['"2023-02-29"']),
        ('start: a a\na: %json {\n"type":\n"boolean"}', ["truefalse"], ["true"]),
        ('start: %json {"type": "array"}', ["[ 1, 2]", "[\n  1]"], ["[  1]"]),
        ('start: "%json 7" /%json 8/ # %json 9', ["%json 7%json 8"], ["7"]),
        ("start: %json true", ["1", '{"a": []}'], ["x"]),
    ],
)
async def test_texts_are_as_those_of_schemas_alone(
    compiler: GrammarCompiler, lark: str, good: list[str], bad: list[str]
) -> None:
    tokenizer = LLTokenizer(byte_tokenizer_json(), eos_token=[EOS])
    text = await compiler.compile(GrammarSource("grammar", lark))

    def is_taken(answer: str) -> bool:
        matcher = LLMatcher(tokenizer, text, log_level=0)
        tokens = tokenizer.tokenize_str(answer)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [is_taken(answer) for answer in good] == [True] * len(good)
    assert [is_taken(answer) for answer in bad] == [False] * len(bad)


async def test_what_is_said_of_a_grammar_names_its_own_lines_and_shows_none_of_ours(compiler: GrammarCompiler) -> None:
    with pytest.raises(SourceRefused) as caught:
        await compiler.compile(GrammarSource("grammar", 'start: a b\na: %json {\n"type":\n"null"\n}\nb: c'))
    assert 'at 6(4): unknown name: "c"' in caught.value.reason
    with pytest.raises(SourceRefused) as caught:
        await compiler.compile(GrammarSource("grammar", 'start: A\nA: %json {"type": "null"}'))
    assert "at 2(4)" in caught.value.reason
    assert "whitespace" not in caught.value.reason


@pytest.mark.parametrize("options", ["temperature=0.5", 'stop="]", temperature=0.5', "stop=/[/, temperature = 0.5"])
async def test_a_rule_s_temperature_is_found_behind_any_other_option(compiler: GrammarCompiler, options: str) -> None:
    with pytest.raises(SourceRefused, match="temperature"):
        await compiler.compile(GrammarSource("grammar", f"start: a\na[{options}]: /b*/"))
    told = 'start: "[temperature=1]" %json {"description": "[temperature = C]"} # [temperature=1]'
    assert await compiler.compile(GrammarSource("grammar", told))


def test_only_schemas_are_changed() -> None:
    def followed(schema: Any) -> dict[str, Any]:
        return {"was": schema}

    lark = 'start: "%json {}" %json {"a": "}\\""} /%json {}/ # %json {}\n| %json false\n| %json{\n}\nb: "x"'
    assert with_embedded_schemas(lark, followed) == (
        'start: "%json {}" %json {"was":{"a":"}\\""}} /%json {}/ # %json {}\n| %json {"was":false}\n'
        '| %json{\n"was":{}}\nb: "x"'
    )
