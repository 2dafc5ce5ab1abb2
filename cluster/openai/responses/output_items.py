"""The output of a response as it grows: items, and the events that tell of each change."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]

_COMPLETED, _IN_PROGRESS = "completed", "in_progress"


class OutputItems:
    """Mutable. Takes the deltas of chat chunks; an item is open until another kind of text comes, or the end.

    items: in order, the last one perhaps still open: then it has what came so far. All methods that change it return
    the events of the change, in order, without their sequence numbers.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None
        self._held: list[dict[str, Any]] = []  # log-probabilities of text that has not come yet

    def add(self, delta: Mapping[str, Any], logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """delta: of one chat chunk, of any of reasoning_content, content and tool_calls. logprobs: of its tokens; those
        of reasoning and of calls are left out.
        """
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content"):
            events += self._text_item("reasoning", events).add(reasoning, [])
            logprobs = self._held = []
        self._held += logprobs or []
        if text := delta.get("content"):
            events += self._text_item("message", events).add(text, self._taken())
        for call in delta.get("tool_calls") or ():
            events += self._call_item(call, events).add(call["function"].get("arguments") or "")
            self._held = []
        return events

    def more_text(self, text: str) -> bool:
        """Adds to an open message, if there is one: for whoever writes the event by itself. False: nothing is done."""
        if self._held or not isinstance(self._open, _TextItem) or self._open.kind != "message":
            return False
        self._open.add_text(text)
        return True

    def text_event(self, text: str) -> Event:
        """What tells of more text in the open message. Changes nothing."""
        assert isinstance(self._open, _TextItem)
        return self._open.event(text, [])

    def end(self, status: str) -> list[Event]:
        """The last item has this status. There is at least one: an empty message, if nothing came."""
        events: list[Event] = []
        if not self.items or (self._held and self._is_open("message")):
            events += self._text_item("message", events).add("", self._taken())
        return events + self._close(status)

    def failed(self) -> list[dict[str, Any]]:
        """The items with what came so far, the open one as incomplete. Changes the open one."""
        self._close("incomplete")
        return self.items

    def _taken(self) -> list[dict[str, Any]]:
        held, self._held = self._held, []
        return held

    def _is_open(self, kind: str) -> bool:
        return isinstance(self._open, _TextItem) and self._open.kind == kind

    def _text_item(self, kind: str, events: list[Event]) -> _TextItem:
        if isinstance(self._open, _TextItem) and self._open.kind == kind:
            return self._open
        opened = _TextItem(kind, len(self.items))
        self._opened(opened, events)
        return opened

    def _call_item(self, call: Mapping[str, Any], events: list[Event]) -> _CallItem:
        """call: an entry of tool_calls; the first one of its index has the function's name."""
        if isinstance(self._open, _CallItem) and self._open.number == call["index"]:
            return self._open
        name = call["function"]["name"]
        opened = _CallItem(call["index"], call.get("id") or f"call_{uuid.uuid4().hex}", name, len(self.items))
        self._opened(opened, events)
        return opened

    def _opened(self, opened: _TextItem | _CallItem, events: list[Event]) -> None:
        """Mutates events."""
        events += self._close(_COMPLETED)
        self.items.append(opened.item)
        self._open = opened
        # A copy: what the event shows is the item as it begins.
        added = {"type": "response.output_item.added", "output_index": opened.index, "item": dict(opened.item)}
        events += [added, *opened.begin()]

    def _close(self, status: str) -> list[Event]:
        if (closed := self._open) is None:
            return []
        self._open = None
        events = closed.close(status)
        return [*events, {"type": "response.output_item.done", "output_index": closed.index, "item": closed.item}]


class _TextItem:
    """A message, or reasoning: one part of text."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index
        self._words = "response.output_text" if kind == "message" else "response.reasoning_text"
        self._part_type = "output_text" if kind == "message" else "reasoning_text"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        if kind == "message":
            self.item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        else:
            self.item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        self.item |= {"status": _IN_PROGRESS, "content": []}
        self._at = {"item_id": self.item["id"], "output_index": index, "content_index": 0}

    def begin(self) -> list[Event]:
        return [{"type": "response.content_part.added", **self._at, "part": self._part("", [])}]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        if not text and not logprobs:
            return []
        self._texts.append(text)
        self._logprobs += logprobs
        return [self.event(text, logprobs)]

    def add_text(self, text: str) -> None:
        self._texts.append(text)

    def event(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        return {"type": f"{self._words}.delta", **self._at, "delta": text, **self._scores(logprobs)}

    def close(self, status: str) -> list[Event]:
        text = "".join(self._texts)
        part = self._part(text, self._logprobs)
        self.item |= {"status": status, "content": [part]}
        return [
            {"type": f"{self._words}.done", **self._at, "text": text, **self._scores(self._logprobs)},
            {"type": "response.content_part.done", **self._at, "part": part},
        ]

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": []} if self.kind == "message" else {}
        return {"type": self._part_type, "text": text, **more, **self._scores(logprobs)}

    def _scores(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind == "message" else {}


class _CallItem:
    """A call of a function. number: among the calls of the answer."""

    def __init__(self, number: int, call_id: str, name: str, index: int) -> None:
        self.number, self.index = number, index
        self._arguments: list[str] = []
        self.item: dict[str, Any] = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": _IN_PROGRESS,
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        self._at = {"item_id": self.item["id"], "output_index": index}

    def begin(self) -> list[Event]:
        return []

    def add(self, arguments: str) -> list[Event]:
        if not arguments:
            return []
        self._arguments.append(arguments)
        return [{"type": "response.function_call_arguments.delta", **self._at, "delta": arguments}]

    def close(self, status: str) -> list[Event]:
        whole = "".join(self._arguments)
        self.item |= {"status": status, "arguments": whole}
        done = {"type": "response.function_call_arguments.done", **self._at, "name": self.item["name"]}
        return [done | {"arguments": whole}]
