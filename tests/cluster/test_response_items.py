"""Items of a response and their events: however the text is cut, what the events tell is what the response has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.openai.responses.output_items import OutputItems

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
Delta = dict[str, Any]

THOUGHT, SAID, ARGUMENTS = "Hm, é🔥", "Let me\n\nsee: ", ('{"city": "Paris"}', '{"n": 1}')


def reasoning(text: str) -> Delta:
    return {"reasoning_content": text}


def content(text: str) -> Delta:
    return {"content": text}


def call(index: int, arguments: str, name: str | None = None) -> Delta:
    """A chunk's delta of one call; its first one has the name and the id."""
    first = {} if name is None else {"id": f"call_{index}", "type": "function"}
    function = ({} if name is None else {"name": name}) | {"arguments": arguments}
    return {"tool_calls": [{"index": index, **first, "function": function}]}


def answer(cuts: list[int]) -> list[Delta]:
    """The deltas of one answer with all there is, each text cut at these places."""
    deltas = [reasoning(piece) for piece in cut(THOUGHT, cuts)] + [content(piece) for piece in cut(SAID, cuts)]
    for index, arguments in enumerate(ARGUMENTS):
        first, *rest = cut(arguments, cuts)
        deltas += [call(index, first, f"f{index}"), *(call(index, piece) for piece in rest)]
    return deltas


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as the events tell of them, with their texts joined from deltas."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        EVENT.validate_python(event | {"sequence_number": 0})
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items)
            items.append(dict(event["item"]))
            texts.append("")
            continue
        assert index == len(items) - 1  # one at a time
        if "item_id" in event:
            assert event["item_id"] == items[index]["id"]
        if kind.endswith(".delta"):
            texts[index] += event["delta"]
        elif kind.endswith("text.done"):
            assert event["text"] == texts[index]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == texts[index]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts[index]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            items[index] = event["item"]
    assert [text_of(item) for item in items] == texts
    return items


def text_of(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def run(deltas: list[Delta], status: str = "completed") -> list[dict[str, Any]]:
    items = OutputItems()
    events = [event for delta in deltas for event in items.add(delta)]
    events += items.end(status)
    assert told(events) == items.items
    for item in items.items:
        ITEM.validate_python(item)
    return items.items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


WHOLE = [
    ("reasoning", THOUGHT),
    ("message", SAID),
    ("function_call", ARGUMENTS[0]),
    ("function_call", ARGUMENTS[1]),
]


def test_every_cut_gives_the_same_items() -> None:
    longest = max(len(THOUGHT), len(SAID), *map(len, ARGUMENTS))
    uncut = without_ids(run(answer([])))
    for first in range(longest):
        for second in range(first, longest):
            assert without_ids(run(answer([first, second]))) == uncut
    everywhere = run(answer(list(range(1, longest))))
    assert [(item["type"], text_of(item)) for item in everywhere] == WHOLE
    assert [item["call_id"] for item in everywhere[2:]] == ["call_0", "call_1"]
    assert [item["name"] for item in everywhere[2:]] == ["f0", "f1"]


pieces = st.lists(
    st.one_of(
        st.text(max_size=5).map(reasoning),
        st.text(max_size=5).map(content),
        st.just({"role": "assistant", "content": ""}),
        st.just({}),
    ),
    max_size=12,
)


@given(pieces, st.sampled_from(["completed", "incomplete"]))
def test_whatever_comes_the_events_tell_of_the_items(deltas: list[Delta], status: str) -> None:
    items = run(deltas, status)
    assert "".join(text_of(item) for item in items) == "".join(
        delta.get("reasoning_content", "") + delta.get("content", "") for delta in deltas
    )
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [status]
    assert all(before["type"] != after["type"] for before, after in itertools.pairwise(items))


@pytest.mark.parametrize("arguments", ["", "{}"])
def test_a_call_alone_is_the_only_item(arguments: str) -> None:
    items = run([{"role": "assistant", "content": ""}, call(0, "", "f"), call(0, arguments)])
    assert [(item["type"], item["arguments"], item["call_id"]) for item in items] == [
        ("function_call", arguments, "call_0")
    ]


def test_one_delta_may_have_it_all() -> None:
    deltas = [{**reasoning("a"), **content("b"), "tool_calls": [*call(0, "{}", "f")["tool_calls"],
                                                              *call(1, "{}", "g")["tool_calls"]]}]  # fmt: skip
    assert [item["type"] for item in run(deltas)] == ["reasoning", "message", "function_call", "function_call"]


def test_one_that_failed_shows_what_came() -> None:
    items = OutputItems()
    for delta in (reasoning("a"), call(0, '{"a', "f")):
        items.add(delta)
    assert [(item["status"], text_of(item)) for item in items.failed()] == [("completed", "a"), ("incomplete", '{"a')]


def score(token: str) -> list[dict[str, Any]]:
    return [{"token": token, "bytes": list(token.encode()), "logprob": -1.0, "top_logprobs": []}]


def test_log_probabilities_are_of_the_messages_tokens() -> None:
    """A token whose text comes later, or never, has its place; those of tags, thoughts and calls have none."""
    items = OutputItems()
    deltas = [
        (content(""), "<think>"),
        (reasoning("hm"), "hm"),
        (content(""), "</think>"),
        (reasoning("."), "."),
        (content(""), "\xc3"),
        (content("é"), "\xa9"),
        (content(""), "<tool_call>"),
        (call(0, "", "f"), "f"),
        (content("b"), "b"),
        (content(""), "<eos>"),
    ]
    events = [event for delta, token in deltas for event in items.add(delta, score(token))]
    events += items.end("completed")
    told(events)
    messages = [item for item in items.items if item["type"] == "message"]
    got = [[entry["token"] for entry in item["content"][0]["logprobs"]] for item in messages]
    assert got == [["\xc3", "\xa9"], ["b", "<eos>"]]
    streamed = [entry["token"] for event in events if event["type"].endswith("text.delta")
                for entry in event.get("logprobs", [])]  # fmt: skip
    assert streamed == [token for tokens in got for token in tokens]


def test_an_empty_message_has_the_log_probabilities_of_its_end() -> None:
    items = OutputItems()
    told([*items.add(content(""), score("<eos>")), *items.end("completed")])
    assert items.items[0]["content"][0]["logprobs"] == score("<eos>")
