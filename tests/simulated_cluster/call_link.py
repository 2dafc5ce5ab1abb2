"""A router's connection to one replica: calls and replies in order, late, or never when it breaks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.routing.call_channel import CallFailed
from cluster.routing.pool_client import _REPLIES, Loss, ReplicaLost
from replicas.channels.wire import encode
from replicas.messages import Call
from tests.simulated_cluster.world import World

if TYPE_CHECKING:
    from tests.simulated_cluster.replica import SimulatedReplica

_LATE_S = 1.0
_CALM_S = 0.02
_PROBE_S = 1.0  # until a replica notices that a router has gone


class CallLink:
    """As `cluster.routing.call_channel.CallChannel`: of no use once it is broken."""

    def __init__(self, world: World, router: str, replica: SimulatedReplica) -> None:
        self.world, self.router, self.replica = world, router, replica
        self.is_broken = self.is_doomed = False
        self._waiting: dict[str, tuple[Call[Any], asyncio.Future[Any]]] = {}
        self._there_s = self._back_s = 0.0  # when the last message arrives

    @property
    def is_disturbed(self) -> bool:
        """Whether it is about to break, or something arrives later than calm calls take."""
        is_late = max(self._there_s, self._back_s) > self.world.now_s + _CALM_S
        return not self.is_broken and (self.is_doomed or is_late)

    async def call(self, call_id: str, call: Call[Any]) -> Any:
        """The reply. Cancelling this cancels the call there. Raises ReplicaLost, CallFailed."""
        payload = encode(call)
        reply: asyncio.Future[Any] = self.world.loop.create_future()
        self._waiting[call_id] = call, reply
        try:
            self._send(self.replica.take, call_id, payload)
            return await reply
        finally:
            if self._waiting.pop(call_id, None) is not None:  # cancelled
                self._send(self.replica.cancel, call_id)

    def reply(self, call_id: str, payload: bytes, failed: str = "") -> None:
        """The replica answers."""
        self._back_s = max(self._back_s, self.world.now_s + self._delay_s())
        self.world.loop.call_at(self._back_s, self._answered, call_id, payload, failed)

    def break_later(self, delay_s: float, loss: Loss, detail: str) -> None:
        """It breaks then, whatever the weather."""
        self.is_doomed = True
        self.world.later(delay_s, self.break_off, loss, detail)

    def break_off(self, loss: Loss, detail: str) -> None:
        """Whoever waits is told; the replica notices a little later."""
        if self.is_broken:
            return
        self.is_broken = True
        waiting, self._waiting = self._waiting, {}
        for _, reply in waiting.values():
            if not reply.done():
                reply.set_exception(ReplicaLost(self.replica.name, loss, detail))
        self.world.later(self.world.rng.uniform(0.0, _PROBE_S), self.replica.act, partial(self.replica.hung_up, self))

    def vanish(self) -> None:
        """The router's process has ended: nobody is told here, and the replica notices a little later."""
        self._waiting.clear()
        self.break_off(Loss.DEAD, "")

    def _answered(self, call_id: str, payload: bytes, failed: str) -> None:
        if self.is_broken or call_id not in self._waiting:
            return
        call, reply = self._waiting.pop(call_id)
        if reply.done():
            return
        if failed:
            reply.set_exception(CallFailed(failed))
        else:
            reply.set_result(_REPLIES[type(call)](payload))

    def _send(self, act: Any, *arguments: Any) -> None:
        if self.is_broken:
            return
        self._there_s = max(self._there_s, self.world.now_s + self._delay_s())
        self.world.loop.call_at(self._there_s, self._arrive, partial(act, self, *arguments))

    def _arrive(self, act: partial[Any]) -> None:
        if not self.is_broken:
            self.replica.act(act)

    def _delay_s(self) -> float:
        world = self.world
        delay_s = world.about(world.odds.call_s)
        if world.happens(world.odds.call_late):
            delay_s += world.rng.uniform(0.0, _LATE_S)
            world.seen["call late"] += 1
        return delay_s
