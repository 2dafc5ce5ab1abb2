"""Answers of each family are taken apart alike, however their text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.answers.answer_part import AnswerPart, PartKind, joined
from cluster.answers.answer_splitter import CallCounts, TagSplitter
from cluster.answers.format_table import CALL_ROWS, ROWS, calls_in, reasoning_in
from tests.cluster.answer_families import PARAMETERS, TEMPLATES, TRANSCRIPTS, Transcript

OFFERED: dict[str, Any] = {"weather": PARAMETERS, "time": {}}


def splitter_of(family: str, opens_in_prompt: bool = False) -> TagSplitter:
    template = TEMPLATES[family]
    return TagSplitter(reasoning_in(template), calls_in(template), OFFERED, opens_in_prompt)


def taken_apart(splitter: TagSplitter, pieces: list[str]) -> tuple[list[AnswerPart], CallCounts]:
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return joined(parts + splitter.finish()), splitter.counts


def cuts(text: str, *places: int) -> list[str]:
    return [text[start:end] for start, end in pairwise(sorted({0, len(text), *places}))]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: f"{t.family}: {t.text[:30]!r}")
def test_every_cut_gives_the_same_parts(transcript: Transcript) -> None:
    text = transcript.text
    expected = [AnswerPart(PartKind[kind], *rest) for kind, *rest in transcript.parts]  # type: ignore[arg-type]
    all_cuts = [[text], list(text), *(cuts(text, place) for place in range(1, len(text)))]
    all_cuts += [[text[i : i + size] for i in range(0, len(text), size)] for size in (2, 3, 5, 7)]
    for pieces in all_cuts:
        parts, counts = taken_apart(splitter_of(transcript.family, transcript.opens_in_prompt), pieces)
        assert parts == expected, pieces
        assert (counts.num_valid, counts.num_malformed) == (transcript.num_valid, transcript.num_malformed)
        assert counts.is_open == transcript.is_open
    for part in expected:
        if part.kind is PartKind.ARGUMENTS and transcript.num_valid == counts.num_calls:
            assert isinstance(json.loads(part.text), dict)


# What any syntax is made of, and what is near to it.
_PIECES = [
    *sorted({text for row in CALL_ROWS if row.calls is not None for text in row.calls.texts if text}),
    *("<think>", "</think>", "<function=weather>", "<parameter=city>", "</parameter>", "</function>", "\n", " ", "a"),
    *(
        '{"name": "weather", "arguments": ',
        '{"name": "time"}',
        '{"city": "x"}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ":",
        "\\",
        "1",
    ),
    *("<", "é\U0001f525", "weather", "```json\n", "{}", "; "),
]
texts = st.lists(st.sampled_from(_PIECES), max_size=14).map("".join)


@given(st.sampled_from(list(TEMPLATES)), texts, st.data(), st.booleans())
def test_any_text_in_any_cut(family: str, text: str, data: st.DataObject, is_open: bool) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    parts, counts = taken_apart(splitter_of(family, is_open), [text])
    assert taken_apart(splitter_of(family, is_open), cuts(text, *places)) == (parts, counts)
    assert taken_apart(splitter_of(family, is_open), list(text)) == (parts, counts)
    begun = [part.call for part in parts if part.kind is PartKind.CALL]
    assert begun == list(range(counts.num_calls))
    assert counts.num_valid <= counts.num_calls
    if not counts.num_calls and not any(part.kind is PartKind.REASONING for part in parts) and "think" not in text:
        # Nothing was taken for anything else: only markers around calls are missing.
        rest = text
        for row in CALL_ROWS:
            for marker in row.calls.around if row.calls is not None else ():
                rest = rest.replace(marker, "")
        content = "".join(part.text for part in parts)
        if rest == text:
            assert content == text or content == text.lstrip()


def test_what_is_certain_is_not_held_back() -> None:
    splitter = splitter_of("qwen3")
    call = ['<tool_call>{"name": "time", ', '"arguments": {"a', '": 1', "}", "}", "</tool_call>"]
    pieces = ["<think>", "a b", " c</", "think>", "\n\n", "Hi", " there <", "b", *call]
    shown = [[part.text for part in splitter.push(piece)] for piece in pieces]
    assert shown[:8] == [[], ["a b"], [" c"], [], [], ["Hi"], [" there"], [" <b"]]
    assert shown[8:] == [[], ["time", '{"a'], ['": 1'], ["}"], [], []]
    assert splitter.finish() == []


def test_work_is_proportional_to_the_text() -> None:
    """Many beginnings of calls, none of which goes on: each character is looked at a few times."""
    for opener in ('<tool_call>{"name": "', "<tool_call>", "<think>", "[TOOL_CALLS]["):
        text = opener * 4_000
        parts, _ = taken_apart(splitter_of("hermes"), [text[i : i + 5] for i in range(0, len(text), 5)])
        assert "".join(part.text for part in parts) == text


def test_a_parser_is_found_by_the_template() -> None:
    for name, template in TEMPLATES.items():
        found = calls_in(template)
        assert (found.name if found else "plain") == {"qwen3": "hermes"}.get(name, name)
    assert [name for name in TEMPLATES if reasoning_in(TEMPLATES[name])] == ["qwen3", "deepseek_r1", "deepseek_v31"]


def test_names_of_parsers_are_those_of_the_config_and_of_the_metrics() -> None:
    from cluster.config.model import ModelConfig
    from cluster.monitoring.ingress_metrics import CALL_PARSERS

    names = ModelConfig.model_json_schema()["properties"]["answer_parser"]["enum"]
    assert set(names) == {"auto", "none", *ROWS}
    assert set(CALL_PARSERS) == {*(row.calls.name for row in CALL_ROWS if row.calls), "response_template"}
