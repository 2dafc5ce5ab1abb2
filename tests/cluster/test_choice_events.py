"""Events made by filling in are the bytes of the whole chunk, dumped."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.choice_events import ChoiceEvents
from cluster.openai.response import Answer, ChatAnswer, CompletionAnswer, sse_event
from cluster.text.choice import TextDelta

# Everything that JSON or the framing could trip over, more often than chance would have it.
texts = st.text() | st.text(alphabet='"\\\n\r\u2028\x00\x7f{}:, data[DONE]\U0001f525é')
answers = st.builds(
    lambda of, id_, model, usage, ids, fingerprint: of(id_, model, 7, usage, ids, fingerprint),
    st.sampled_from([ChatAnswer, CompletionAnswer]),
    texts,
    texts,
    st.booleans(),
    st.booleans(),
    st.none() | texts,
)
deltas = st.lists(st.tuples(texts, st.integers(0, 1 << 40)), max_size=6)


def whole_chunks(answer: Answer, index: int, items: list[tuple[str, int]], reason: str) -> bytes:
    """The independent reference: every chunk built and dumped."""
    opening = answer.opening(index)
    chunks = [] if opening is None else [opening]
    for text, token_id in items:
        if text or answer.return_token_ids:
            chunks.append(answer.delta(index, text, (token_id,) if answer.return_token_ids else None))
    return b"".join(map(sse_event, [*chunks, answer.finish(index, reason)]))


@given(answers, st.integers(0, 300), deltas, texts)
def test_the_same_bytes_as_whole_chunks(answer: Answer, index: int, items: list[tuple[str, int]], last: str) -> None:
    events = ChoiceEvents(answer, index)
    got = [events.of(TextDelta(index, text, None, token_id)) for text, token_id in items]
    got.append(events.of(TextDelta(index, last, "stop", 5)))
    assert b"".join(got) == whole_chunks(answer, index, [*items, (last, 5)], "stop")


@given(texts.filter(bool))
def test_each_is_one_line_of_json_with_the_text_in_its_place(text: str) -> None:
    events = ChoiceEvents(replace(CompletionAnswer("id", "model", 7), include_usage=True), 3)
    event = events.of(TextDelta(3, text, None, 1))
    assert (event[:6], event[-2:], event.count(b"\n")) == (b"data: ", b"\n\n", 2)
    chunk = json.loads(event[6:])
    assert chunk["choices"] == [{"index": 3, "text": text, "logprobs": None, "finish_reason": None}]
    assert chunk["usage"] is None


@pytest.mark.parametrize("answer", [ChatAnswer("id", "model", 7), CompletionAnswer("id", "model", 7)])
def test_a_delta_without_text_shows_nothing(answer: Answer) -> None:
    events = ChoiceEvents(answer, 0)
    events.of(TextDelta(0, "opens", None, 1))
    assert events.of(TextDelta(0, "", None, 1)) == b""
