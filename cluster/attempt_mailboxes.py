"""Frames sorted by request: what decode says of an attempt waits here for the task that runs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from replicas.messages import Frame, TokenItem


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decode has promised memory."""


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """Frames of this replica are gone for good: what it sent can't be trusted to be complete."""

    detail: str


Mail = Admitted | TokenItem | ChannelLost


class Mailboxes:
    """One queue per attempt in flight. One event loop; nothing blocks."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Queue[Mail]] = {}
        self._replica_of: dict[str, str] = {}

    def open(self, request_id: str, replica_id: str) -> asyncio.Queue[Mail]:
        """The box of an attempt at one decode replica; frames of others can't reach it."""
        box: asyncio.Queue[Mail] = asyncio.Queue()
        self._boxes[request_id] = box
        self._replica_of[request_id] = replica_id
        return box

    def close(self, request_id: str) -> None:
        self._boxes.pop(request_id, None)
        self._replica_of.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._boxes)

    def deliver(self, frame: Frame) -> None:
        """Sort a frame. What belongs to nobody any more is dropped: its request was ended here first."""
        for request_id in frame.admitted:
            self._put(frame.replica_id, request_id, Admitted())
        for item in frame.tokens:
            self._put(frame.replica_id, item.request_id, item)

    def lose(self, replica_id: str, detail: str) -> None:
        """Tell every attempt at a replica that frames are missing."""
        for request_id, owner in self._replica_of.items():
            if owner == replica_id:
                self._boxes[request_id].put_nowait(ChannelLost(detail))

    def _put(self, replica_id: str, request_id: str, mail: Mail) -> None:
        if self._replica_of.get(request_id) == replica_id:
            self._boxes[request_id].put_nowait(mail)
