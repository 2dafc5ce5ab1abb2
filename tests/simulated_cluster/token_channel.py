"""Both ends of the token channel without sockets: frames that are lost, doubled, overtaken, garbled, or stuck."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import zmq

from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.token_sender import TokenSender
from replicas.engine.token_frames import TokenFrames
from replicas.messages import ChannelAddress, Frame
from tests.simulated_cluster.world import World

_LATE_S = 0.3
_STUCK_S = 4.0


class _Part:
    """As zmq.Frame: a payload, and who sent it."""

    def __init__(self, payload: bytes, key: str) -> None:
        self.bytes, self._key = payload, key

    def get(self, name: str) -> str:
        return self._key

    def __len__(self) -> int:
        return len(self.bytes)


class SimulatedReceiver(TokenReceiver):
    """The router's end: numbering, gaps and replays are the real ones."""

    def __init__(
        self, router_id: str, host: str, on_frame: Callable[[Frame], None], on_gap: Callable[[str, str, int], None]
    ) -> None:
        super().__init__(router_id, host, on_frame, on_gap)
        self._context.term()

    @property
    def address(self) -> ChannelAddress:
        return ChannelAddress(self._router_id, f"tcp://{self._router_id}", "key")

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def arrive(self, payload: bytes, key: str) -> None:
        """A frame came by the wire."""
        self._take([_Part(payload, key)])  # type: ignore[list-item]


class SimulatedSender(TokenSender):
    """A replica's end: rings, replays and stalls are the real ones.

    find: the receiver that a router has now, or None. is_cut: whether this process can send nothing any more.
    """

    def __init__(
        self,
        world: World,
        replica_id: str,
        epoch: str,
        find: Callable[[str], SimulatedReceiver | None],
        stall_deadline_s: float,
    ) -> None:
        super().__init__(replica_id, epoch, stall_deadline_s=stall_deadline_s, ring_frames=64)
        self._context.term()
        self.world, self.find, self.replica_id = world, find, replica_id
        self.is_cut = False

    def _connect(self, address: ChannelAddress) -> tuple[Any, Any]:
        return _Wire(self, address.router_id), _NoMonitor()

    @property
    def is_stuck(self) -> bool:
        """Whether a channel to a router that lives takes nothing."""
        wires: list[Any] = [channel.socket for channel in self._channels.values()]
        return any(0.0 < wire.stuck_s < math.inf for wire in wires)

    @property
    def stuck_s(self) -> float:
        """For how long no channel takes what waits for it."""
        waiting: list[Any] = [channel.socket for channel in self._channels.values() if channel.ring.has_unsent]
        return min((wire.stuck_s for wire in waiting), default=0.0)


class PatientFrames(TokenFrames):
    """A real channel says nothing, and is tried again and again; ours knows for how long that is in vain."""

    sender: SimulatedSender

    def idle_s(self, longest_s: float) -> float:
        return max(super().idle_s(longest_s), min(self.sender.stuck_s, self._idle_frame_s))


class _NoMonitor:
    """As the monitor of a socket that was never refused."""

    def poll(self, timeout_ms: int) -> int:
        return 0

    def close(self, linger: int) -> None:
        pass


class _Wire:
    """As a PUSH socket to one router."""

    def __init__(self, sender: SimulatedSender, router_id: str) -> None:
        self._sender, self._router_id = sender, router_id
        self._stuck_until_s = 0.0
        self._last_s = 0.0

    @property
    def stuck_s(self) -> float:
        """For how long it takes nothing."""
        is_there = self._sender.find(self._router_id) is not None
        return self._stuck_until_s - self._sender.world.now_s if is_there else math.inf

    def send(self, payload: bytes, flags: int) -> None:
        world = self._sender.world
        odds, who = world.odds, self._sender.replica_id
        if world.now_s < self._stuck_until_s or self._sender.find(self._router_id) is None:
            raise zmq.Again
        if world.happens(odds.channel_stuck):
            self._stuck_until_s = world.now_s + world.rng.uniform(0.0, _STUCK_S)
            world.fault(who, "channel stuck", "to %s until %.3f", self._router_id, self._stuck_until_s)
            raise zmq.Again
        if world.happens(odds.frame_lost):
            world.fault(who, "frame lost", "to %s", self._router_id)
            return
        # In order, but for those that are overtaken.
        self._last_s = max(self._last_s, world.now_s + world.about(odds.call_s))
        arrival_s = self._last_s
        if world.happens(odds.frame_late):
            arrival_s += world.rng.uniform(0.0, _LATE_S)
            world.fault(who, "frame late", "to %s", self._router_id)
        if world.happens(odds.frame_garbled):
            payload = payload[: world.rng.randrange(len(payload))]
            world.fault(who, "frame garbled", "to %s", self._router_id)
        for _ in range(2 if world.happens(odds.frame_twice) else 1):
            world.loop.call_at(arrival_s, self._arrive, payload)

    def _arrive(self, payload: bytes) -> None:
        receiver = self._sender.find(self._router_id)
        if receiver is not None and not self._sender.is_cut:
            receiver.arrive(payload, self._sender.public_key)

    def disable_monitor(self) -> None:
        pass

    def close(self, linger: int) -> None:
        self._stuck_until_s = 0.0
