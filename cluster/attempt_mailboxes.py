"""Frames sorted by request: what decode says of an attempt waits here for the task that runs it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.pool_client import PoolClient
from cluster.replica_registry import ReplicaTable
from replicas.messages import ChannelAddress, Frame, PromptLogprobs, TokenItem
from replicas.token_receiver import TokenReceiver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decode has promised memory."""


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """Frames of this replica are gone for good: what it sent can't be trusted to be complete."""

    detail: str


Mail = Admitted | PromptLogprobs | TokenItem | ChannelLost


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
        for part in frame.prompts:
            self._put(frame.replica_id, part.request_id, part)
        for item in frame.tokens:
            self._put(frame.replica_id, item.request_id, item)

    def has_any(self, replica_id: str) -> bool:
        """Whether some attempt at this replica is in flight."""
        return replica_id in self._replica_of.values()

    def lose(self, replica_id: str, detail: str) -> None:
        """Tell every attempt at a replica that frames are missing."""
        for request_id, owner in self._replica_of.items():
            if owner == replica_id:
                self._boxes[request_id].put_nowait(ChannelLost(detail))

    def _put(self, replica_id: str, request_id: str, mail: Mail) -> None:
        if self._replica_of.get(request_id) == replica_id:
            self._boxes[request_id].put_nowait(mail)


class FrameIntake:
    """The router's end of the token channels: frames in order to on_frame, and missing ones fetched again.

    When they cannot be had, every attempt at their replica is told: none of them is complete any more.
    """

    def __init__(
        self,
        router_id: str,
        host: str,
        decode: PoolClient,
        mailboxes: Mailboxes,
        *,
        on_frame: Callable[[Frame], None],
        on_gap: Callable[[], None],
        replay_timeout_s: float,
    ) -> None:
        """on_gap: something is missing and is being fetched."""
        self._router_id, self._decode, self._mailboxes = router_id, decode, mailboxes
        self._on_gap, self._replay_timeout_s = on_gap, replay_timeout_s
        self._replays: set[asyncio.Task[None]] = set()
        self._admitted: ReplicaTable = {}
        self.receiver = TokenReceiver(router_id, host, on_frame, self._fetch)

    @property
    def address(self) -> ChannelAddress:
        return self.receiver.address

    def admit(self, decodes: ReplicaTable) -> None:
        """Take frames from these replicas, and still from one that left while work of ours ends there; no others."""
        leaving = {
            replica_id: metadata
            for replica_id, metadata in self._admitted.items()
            if replica_id not in decodes and self._mailboxes.has_any(replica_id)
        }
        for replica_id, metadata in self._admitted.items():
            if replica_id not in decodes and replica_id not in leaving:
                self.receiver.disallow(metadata["channel_public_key"])
                self.receiver.forget(replica_id, metadata["peer"]["epoch"])
        for metadata in decodes.values():
            self.receiver.allow(metadata["channel_public_key"])
        self._admitted = {**leaving, **decodes}

    def _fetch(self, replica_id: str, epoch: str, from_seq: int) -> None:
        self._on_gap()
        task = asyncio.create_task(self._replay(replica_id, epoch, from_seq), context=contextvars.Context())
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _replay(self, replica_id: str, epoch: str, from_seq: int) -> None:
        logger.warning("frames missing", extra={"event": "frame_gap", "replica": replica_id, "from_seq": from_seq})
        try:
            async with asyncio.timeout(self._replay_timeout_s):
                frames: list[Frame] = await self._decode.call(replica_id, "replay", self._router_id, from_seq)
            if not any(frame.epoch == epoch and frame.seq == from_seq for frame in frames):
                raise LookupError("the replay does not begin there")
            self.receiver.deliver_replayed(frames)
        except Exception as error:  # gone, or the replica is
            extra = {"event": "frames_lost", "replica": replica_id, "from_seq": from_seq, "reason": repr(error)}
            logger.warning("frames lost", extra=extra)
            self._mailboxes.lose(replica_id, "tokens were lost on their way from decode")
            self.receiver.skip_gap(replica_id, epoch)
