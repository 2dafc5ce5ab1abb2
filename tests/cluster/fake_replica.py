"""One scripted replica: its memory, its life, and the frames it sends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from replicas.channels.token_sender import TokenSender
from replicas.messages import ChannelAddress, EngineLoad, Frame, Token, TransferPeer
from tests.cluster.fake_model import MODEL
from tests.cluster.fake_prefix_cache import FakePrefixCache

EPOCH = "e1"


class FakeReplica:
    """death: done when the replica has died. rings: every frame sent, by router."""

    def __init__(
        self, replica_id: str, total_blocks: int, on_wire: Callable[[FakeReplica, Frame], None], real_channel: bool
    ) -> None:
        """on_wire: called with each frame, in the socket's place. real_channel: a real socket instead."""
        self.replica_id, self.total_blocks, self._on_wire = replica_id, total_blocks, on_wire
        self.used_blocks = self.num_queued = 0
        self.fingerprint = MODEL
        self.cache: FakePrefixCache | None = None
        self.more_load: dict[str, Any] = {}  # other figures that it tells
        self.stalled_s = 0.0  # what it says of its engine when it is asked
        self.is_leaving = False  # refuses new work
        self.thaw = asyncio.Event()  # while it is not set, nothing is sent or answered
        self.thaw.set()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rings: defaultdict[str, list[Frame]] = defaultdict(list)
        self.sender = TokenSender(replica_id, EPOCH) if real_channel else None
        self.public_key = self.sender.public_key if self.sender else zmq.curve_keypair()[0].decode()

    @property
    def is_frozen(self) -> bool:
        return not self.thaw.is_set()

    @property
    def load(self) -> EngineLoad:
        free_blocks = self.total_blocks - self.used_blocks
        return EngineLoad(1, self.num_queued, 0, free_blocks, self.total_blocks, 0.0, **self.more_load)

    def metadata(self) -> dict[str, Any]:
        agent = f"agent-{self.replica_id}"
        peer = TransferPeer(self.replica_id, EPOCH, agent, b"m", self.fingerprint, self.total_blocks, 1)
        return {
            "num_blocks": self.total_blocks,
            "kv_bytes_per_token": 1,
            "channel_public_key": self.public_key,
            "peer": peer.to_metadata(),
        }

    async def send(
        self,
        channel: ChannelAddress,
        admitted: tuple[str, ...] = (),
        tokens: tuple[Token, ...] = (),
        cached: tuple[tuple[str, int], ...] = (),
        drafted: tuple[tuple[str, int, int], ...] = (),
    ) -> None:
        await self.thaw.wait()
        if self.death.done():
            return
        if self.sender is not None:
            self.sender.open(channel)
            self.sender.send(channel.router_id, self.load, admitted, tokens, cached=cached, drafted=drafted)
            while self.sender.has_unsent:
                await asyncio.sleep(0.001)
                self.sender.flush()
            return
        ring = self.rings[channel.router_id]
        frame = Frame(self.replica_id, EPOCH, len(ring), self.load, admitted, tokens, (), cached, drafted)
        ring.append(frame)
        self._on_wire(self, frame)

    @contextmanager
    def queued(self) -> Iterator[None]:
        self.num_queued += 1
        try:
            yield
        finally:
            self.num_queued -= 1

    @contextmanager
    def promised(self, blocks: int) -> Iterator[None]:
        self.used_blocks += blocks
        try:
            yield
        finally:
            self.used_blocks -= blocks
