"""What decode says of attempts: sorted out of the frames, on its way to each of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replicas.messages import Frame, PromptLogprobs, Token


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decode has promised memory."""


@dataclass(frozen=True, slots=True)
class Cached:
    """So many tokens of the prompt were found at decode. Comes before the first token from there."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """So many drafts there were at decode so far, and of these so many held. Comes before the tokens that held."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """Frames of this replica are gone for good: what it sent can't be trusted to be complete."""

    detail: str


Mail = Admitted | Cached | Drafted | PromptLogprobs | Token | ChannelLost


class Mailbox:
    """Mail waits here until the attempt's task takes it; after `pass_on` it does not wait, and does not wake the task.

    One event loop. put: takes one piece of mail; never raises.
    """

    def __init__(self, replica_id: str) -> None:
        """replica_id: whose frames may put something in."""
        self.replica_id = replica_id
        self._waiting: deque[Mail] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self.put: Callable[[Mail], None] = self._keep

    def get_nowait(self) -> Mail | None:
        """What has waited longest, if anything has."""
        return self._waiting.popleft() if self._waiting else None

    def arrival(self) -> asyncio.Future[None]:
        """Done as soon as there is something. The same one until then: one may stop waiting, and begin again."""
        if self._arrival is None or self._arrival.done():
            self._arrival = asyncio.get_running_loop().create_future()
            if self._waiting:
                self._arrival.set_result(None)
        return self._arrival

    def _keep(self, mail: Mail) -> None:
        self._waiting.append(mail)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def pass_on(self, take: Callable[[Mail], bool]) -> asyncio.Future[None]:
        """Give `take` everything that is here and then each piece as it comes, until it returns True or raises.

        Then the returned future is done, with that error if there was one: in the frame that it came by, the mail of
        others must not suffer.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def put(mail: Mail) -> None:
            if over.done():
                return
            try:
                if take(mail):
                    over.set_result(None)
            except Exception as error:
                over.set_exception(error)

        self.put = put
        while (mail := self.get_nowait()) is not None:
            put(mail)
        return over


class Mailboxes:
    """One per attempt in flight. One event loop; nothing blocks."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}

    def open(self, request_id: str, replica_id: str) -> Mailbox:
        """The box of an attempt at one decode replica; frames of others can't reach it."""
        box = self._boxes[request_id] = Mailbox(replica_id)
        return box

    def close(self, request_id: str) -> None:
        self._boxes.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._boxes)

    def deliver(self, frame: Frame) -> None:
        """Sort a frame. What belongs to nobody any more is dropped: its request was ended here first."""
        boxes, replica_id = self._boxes, frame.replica_id
        for request_id in frame.admitted:
            box = boxes.get(request_id)
            if box is not None and box.replica_id == replica_id:
                box.put(Admitted())
        for request_id, num_tokens in frame.cached:
            box = boxes.get(request_id)
            if box is not None and box.replica_id == replica_id:
                box.put(Cached(num_tokens))
        for request_id, num_drafted, num_accepted in frame.drafted:
            box = boxes.get(request_id)
            if box is not None and box.replica_id == replica_id:
                box.put(Drafted(num_drafted, num_accepted))
        for items in (frame.prompts, frame.tokens):
            for item in items:
                box = boxes.get(item.request_id)
                if box is not None and box.replica_id == replica_id:
                    box.put(item)

    def has_any(self, replica_id: str) -> bool:
        """Whether some attempt at this replica is in flight."""
        return any(box.replica_id == replica_id for box in self._boxes.values())

    def lose(self, replica_id: str, detail: str) -> None:
        """Tell every attempt at a replica that frames are missing."""
        for box in self._boxes.values():
            if box.replica_id == replica_id:
                box.put(ChannelLost(detail))
