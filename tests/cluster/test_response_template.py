"""A checkpoint's own response template goes before what its chat template looks like."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.answers.answer_part import AnswerPart, PartKind, joined
from cluster.text.answer_parser import AnswerParser
from tests.cluster.answer_families import TEMPLATES, TOOLS
from tests.cluster.fake_ingress import ByteTokenizer

# As transformers' documentation of response templates has them, for a format of ours.
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|go|>",
    "fields": {
        "reasoning_content": {"open": "((", "close": "))", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<<",
            "close": ">>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|end\|>)", "content": "text"},
    },
}
Parts = list[tuple[str, str]]


def parser_of(template: Any = TEMPLATE, name: str = "auto") -> AnswerParser:
    tokenizer = ByteTokenizer(TEMPLATES["hermes"], ["<|end|>", "<tool_call>"])
    tokenizer.response_template = template
    return AnswerParser(cast("Any", tokenizer), name)


def taken_apart(parser: AnswerParser, prompt: str, pieces: list[str]) -> tuple[Parts, list[int]]:
    reading = parser.reading(list(prompt.encode()), TOOLS)
    assert reading is not None
    assert reading.parser == "response_template"
    assert set(reading.shown.values()) == {b"<|end|>"}  # what it names, and no more
    splitter = reading.splitter()
    parts: list[AnswerPart] = [part for piece in pieces for part in splitter.push(piece)]
    found = [(part.kind.name, part.text) for part in joined(parts + splitter.finish())]
    return found, [splitter.counts.num_valid, splitter.counts.num_malformed]


@pytest.mark.parametrize(
    ("prompt", "text", "parts", "counts"),
    [
        ("<|go|>", "Hello <<", [("CONTENT", "Hello <<")], [0, 1]),
        ("<|go|>", "Hello <| there", [("CONTENT", "Hello <| there")], [0, 0]),
        (
            "<|go|>",
            '((hm))Hi <<{"name": "time", "arguments": {}}>> <<{"name": "weather", "arguments": {"city": "é"}}>><|end|>',
            [
                ("REASONING", "hm"),
                ("CONTENT", "Hi"),
                ("CALL", "time"),
                ("ARGUMENTS", "{}"),
                ("CALL", "weather"),
                ("ARGUMENTS", '{"city":"é"}'),
            ],
            [2, 0],
        ),
        ("<|go|>((", "hm))Hi", [("REASONING", "hm"), ("CONTENT", "Hi")], [0, 0]),
        ("<|go|>", "Hi <<{oops}>> and on", [("CONTENT", "Hi <<{oops}>> and on")], [0, 1]),
        ("<|go|>", 'Hi <<{"name": "f"', [("CONTENT", 'Hi <<{"name": "f"')], [0, 1]),
        ("<|go|>", 'Hi <<{"nome": "f"}>> x', [("CONTENT", 'Hi <<{"nome": "f"}>> x')], [0, 1]),
        ("<|go|>", "Hi <<[1]>> x", [("CONTENT", "Hi <<[1]>> x")], [0, 1]),
    ],
)
def test_every_cut_gives_the_same_parts(prompt: str, text: str, parts: Parts, counts: list[int]) -> None:
    for size in (1, 2, 3, 5, len(text)):
        got = taken_apart(parser_of(), prompt, [text[start : start + size] for start in range(0, len(text), size)])
        assert got == (parts, counts), size


def test_without_tools_calls_are_content() -> None:
    reading = parser_of().reading(list(b"<|go|>"))
    assert reading is not None
    splitter = reading.splitter()
    parts = joined([*splitter.push('Hi <<{"name": "f"}>> x'), *splitter.finish()])
    assert parts == [AnswerPart(PartKind.CONTENT, 'Hi <<{"name": "f"}>> x')]


def test_forced_calls_are_read_as_the_grammar_has_them_written() -> None:
    parser = parser_of()
    assert parser.name == "the checkpoint's response template"
    reading = parser.reading(list(b"p"), TOOLS, is_forced=True)
    assert reading is not None
    assert reading.parser == "hermes"
    splitter = reading.splitter()
    parts = splitter.push('<tool_call>{"name": "time"}</tool_call>')
    assert [part.kind for part in parts] == [PartKind.CALL, PartKind.ARGUMENTS]


def test_the_config_goes_before_it() -> None:
    reading = parser_of(name="hermes").reading(list(b"p"), TOOLS)
    assert reading is not None
    assert reading.parser == "hermes"
    assert parser_of(name="none").reading(list(b"p"), TOOLS) is None


def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="fields"):
        parser_of({"fields": 1})
