"""The router's end of the token channels."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence

from cluster.routing.mailboxes import Mailboxes
from cluster.routing.pool_client import PoolClient
from cluster.routing.replica_registry import ReplicaTable
from replicas.channels.token_receiver import BYTES_PER_TURN, TokenReceiver
from replicas.channels.wire import decode_frame
from replicas.messages import ChannelAddress, Frame, ReplayCall

logger = logging.getLogger(__name__)


class FrameIntake:
    """Frames in order to on_frame, and missing ones fetched again.

    When they cannot be had, every attempt at their replica is told: none of them is complete any more.
    """

    def __init__(
        self,
        router_id: str,
        host: str,
        pool_of: Callable[[str], PoolClient],
        mailboxes: Mailboxes,
        *,
        on_frame: Callable[[Frame], None],
        on_gap: Callable[[], None],
        replay_timeout_s: float,
    ) -> None:
        """pool_of: of a replica. on_gap: something is missing and is being fetched."""
        self._router_id, self._pool_of, self._mailboxes = router_id, pool_of, mailboxes
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
        for replica_id, metadata in decodes.items():
            self.receiver.allow(metadata["channel_public_key"])
            if replica_id not in self._admitted:
                # Serve takes a replica off the table for a moment when it gives it new options.
                self.receiver.resume(replica_id, metadata["peer"]["epoch"])
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
                reply = await self._pool_of(replica_id).submit(replica_id, ReplayCall(self._router_id, from_seq))
            frames = await _decoded(reply.frames)
            if not any(frame.epoch == epoch and frame.seq == from_seq for frame in frames):
                raise LookupError("the replay does not begin there")
            self.receiver.deliver_replayed(frames)
        except Exception as error:  # gone, or the replica is
            extra = {"event": "frames_lost", "replica": replica_id, "from_seq": from_seq, "reason": repr(error)}
            logger.warning("frames lost", extra=extra)
            self._mailboxes.lose(replica_id, "tokens were lost on their way from decode")
            self.receiver.skip_gap(replica_id, epoch)


async def _decoded(payloads: Sequence[bytes]) -> list[Frame]:
    """As many at a time as when they are received: others are served in between. Raises MalformedMessage."""
    frames: list[Frame] = []
    num_bytes = 0
    for payload in payloads:
        frames.append(decode_frame(payload))
        num_bytes += len(payload)
        if num_bytes >= BYTES_PER_TURN:
            num_bytes = 0
            await asyncio.sleep(0)
    return frames
