"""The server-sent events of a response, and the response in one piece: both are made of the same deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from cluster.openai.choice_events import ChoiceEvents
from cluster.openai.response import json_bytes
from cluster.openai.responses.output_items import Event, OutputItems
from cluster.openai.responses.response_object import status_of

if TYPE_CHECKING:
    from cluster.api_error import ApiError
    from cluster.openai.response import Answer
    from cluster.openai.responses.response_object import ResponseObject
    from cluster.text.choice import TextDelta
    from cluster.text.generation import TextGeneration
    from cluster.text.usage import Usage


_NUMBER = b'"sequence_number":'


class ResponseEvents:
    """Mutable; one per response. In this order: `of` for all deltas, then `end`, or `failed` at any time.

    answer: of the chat completion that it is made of; its chunks are translated one by one.
    """

    def __init__(self, response: ResponseObject, answer: Answer, usage: Callable[[], Usage]) -> None:
        """usage: the numbers so far."""
        self._response, self._usage = response, usage
        self._chunks = ChoiceEvents(answer, 0)
        self._items = OutputItems()
        self._finish_reason = "stop"
        self._num_events = 0
        self._filled: _FilledEvent | None = None

    def of(self, deltas: Iterable[TextDelta]) -> bytes:
        """The events of these deltas, behind those of the beginning if they are the first. Mutates."""
        begun = b"" if self._num_events else self._begin()
        return begun + b"".join([self._of_delta(delta) for delta in deltas])

    def end(self) -> bytes:
        """The last events. Mutates."""
        last = self._items.end(status_of(self._finish_reason))
        response = self.whole()
        return self._dumped([*last, {"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError) -> bytes:
        """The last events of one that failed. Clients raise at the second one, if they did not look at the first."""
        begun = b"" if self._num_events else self._begin()
        response = self._response.failed(error, self._items.failed(), self._usage())
        detail = {"code": error.code, "message": error.message, "param": error.param}
        return begun + self._dumped(
            [
                {"type": "response.failed", "response": response},
                {"type": "error", **detail, "error": error.envelope()["error"]},
            ]
        )

    def take(self, deltas: Iterable[TextDelta]) -> None:
        """As `of`, for a response in one piece."""
        for delta in deltas:
            text = self._chunks.only_text(delta)
            if not (text and self._items.more_text(text)):
                self._events(delta)

    def whole(self) -> dict[str, Any]:
        """The response, of all deltas. After `end`, or in its place."""
        self._items.end(status_of(self._finish_reason))
        return self._response.ended(self._finish_reason, self._items.items, self._usage())

    def _begin(self) -> bytes:
        begun = self._response.begun()
        return self._dumped([{"type": f"response.{word}", "response": begun} for word in ("created", "in_progress")])

    def _of_delta(self, delta: TextDelta) -> bytes:
        text = self._chunks.only_text(delta)
        if text and self._items.more_text(text):
            return self._text_event(text)
        self._filled = None  # it may be another message soon
        return self._dumped(self._events(delta))

    def _text_event(self, text: str) -> bytes:
        """More text of the open message."""
        if self._filled is None:
            self._filled = _FilledEvent(self._items)
        number = self._num_events
        self._num_events += 1
        return self._filled.of(number, text)

    def _events(self, delta: TextDelta) -> list[Event]:
        events: list[Event] = []
        for chunk in self._chunks.chunks(delta):
            (choice,) = chunk["choices"]
            logprobs = choice["logprobs"]
            events += self._items.add(choice["delta"], None if logprobs is None else logprobs["content"])
            if choice["finish_reason"] is not None:
                self._finish_reason = choice["finish_reason"]
        return events

    def _dumped(self, events: Sequence[Event]) -> bytes:
        """With their numbers, which go up by one."""
        first = self._num_events
        self._num_events += len(events)
        return b"".join([_dumped(event, number) for number, event in enumerate(events, first)])


class _FilledEvent:
    """The event that nearly all are: only number and text differ, and are filled in. To build and dump it for each
    token takes several times as long.
    """

    def __init__(self, items: OutputItems) -> None:
        mark = uuid.uuid4().hex  # found nowhere else in it
        before, self._after = _dumped(items.text_event(mark), 0).split(json_bytes(mark))
        self._before, between = before.split(_NUMBER + b"0")
        self._before += _NUMBER
        self._between = between

    def of(self, number: int, text: str) -> bytes:
        return b"".join((self._before, str(number).encode(), self._between, json_bytes(text), self._after))


def _dumped(event: Event, number: int) -> bytes:
    """One server-sent event. JSON has no raw line ends, so its data is a single line."""
    kind: str = event["type"]
    data = json_bytes({"type": kind, "sequence_number": number} | event)
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n"))


async def whole_response(generation: TextGeneration, events: ResponseEvents) -> tuple[dict[str, Any], list[str]]:
    """The body, and why its answer ended. Runs to the end. Raises ApiError."""
    reasons: list[str] = []
    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            events.take(deltas)
            reasons += [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    return events.whole(), reasons
