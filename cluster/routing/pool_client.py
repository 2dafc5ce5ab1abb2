"""Calls to the replicas of one pool, each to a named one."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from types import NoneType
from typing import Any

import zmq

from cluster.routing import replica_registry
from cluster.routing.actor_death import has_died
from cluster.routing.call_channel import CallChannel, ChannelBroken
from cluster.routing.detached_tasks import start_detached
from cluster.routing.replica_registry import ReplicaTable
from replicas.channels.wire import Decoder, encode
from replicas.messages import (
    Call,
    CallAddress,
    ForgetPeerCall,
    GenerateCall,
    GenerateReply,
    MigrateCall,
    MigrateReply,
    PrefillCall,
    PrefillReply,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
    ReplyT,
)

_MAX_SOCKETS = 65_536  # three a channel
_REPLIES: dict[type, Decoder[Any]] = {
    GenerateCall: Decoder(GenerateReply),
    PrefillCall: Decoder(PrefillReply),
    PulseCall: Decoder(Pulse),
    ReplayCall: Decoder(ReplayReply),
    ForgetPeerCall: Decoder(NoneType),
    MigrateCall: Decoder(MigrateReply),
}


class Loss(StrEnum):
    """What has become of a replica that a call was for, or that is not chosen any more."""

    DEAD = "dead"  # its process has ended
    UNREACHABLE = "unreachable"  # dead or not
    FROZEN = "frozen"  # it has stopped answering
    LEAVING = "leaving"  # its pool: nothing was begun there


class ReplicaLost(Exception):
    """The replica was lost before it answered: the call may be tried on another. had_left: it had said that it leaves,
    and its end was due. may_have_reached: the call may have been begun there; else it was not."""

    def __init__(
        self, replica_id: str, loss: Loss, detail: str, *, had_left: bool = False, may_have_reached: bool = True
    ) -> None:
        super().__init__(replica_id, loss, detail)
        self.replica_id, self.loss, self.detail = replica_id, loss, detail
        self.had_left = had_left or loss is Loss.LEAVING
        self.may_have_reached = may_have_reached

    def __str__(self) -> str:
        return f"replica {self.replica_id}: {self.detail}"


class PoolClient(ABC):
    """One pool as the router sees it."""

    @abstractmethod
    def replicas(self) -> ReplicaTable:
        """Replica id -> published metadata, of the replicas that take work now."""

    @abstractmethod
    async def submit(self, replica_id: str, call: Call[ReplyT]) -> ReplyT:
        """A call to this replica, for as long as it takes. Cancelling this ends it there.

        Raises ReplicaLost; CallFailed when something broke at the replica; NotSendable.
        """

    def tell_of_deaths(self, tell: Callable[[str], None]) -> None:  # noqa: B027  # most learn of none but by a call
        """Once, before the first call. tell: called with a replica that is found dead though no call is open there: it
        may have answered, and died before it did what others wait for."""

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """No calls any more. On the event loop that made them; those that are open fail."""


@dataclass(frozen=True, slots=True)
class _Link:
    """To one replica. It stays while the replica leaves, when Serve tells of it no more."""

    channel: CallChannel
    actor_name: str


class ServePool(PoolClient):
    """A pool that Ray Serve tells of (`registry_feed`): a channel of our own to each replica."""

    def __init__(self, deployment: str, has_died: Callable[[str], Coroutine[Any, Any, bool]] = has_died) -> None:
        """has_died: whether the actor of this name has, as far as is known."""
        self._deployment, self._has_died = deployment, has_died
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._links: dict[str, _Link] = {}
        self._asked: dict[str, asyncio.Task[bool]] = {}
        self._tell_of_death: Callable[[str], None] = lambda _: None
        self._ids = count()

    def replicas(self) -> ReplicaTable:
        return replica_registry.REGISTRY.replicas(self._deployment)

    async def submit(self, replica_id: str, call: Call[ReplyT]) -> ReplyT:
        payload = encode(call)
        call_id = call.request_id if isinstance(call, GenerateCall | PrefillCall) else str(next(self._ids))
        link = self._links.get(replica_id)
        actor_name = link.actor_name if link is not None else self._metadata(replica_id)["actor"]
        try:
            channel = link.channel if link is not None else self._open(replica_id)
            reply: ReplyT = _REPLIES[type(call)](await channel.call(call_id, payload))
        except ChannelBroken as error:
            loss = Loss.DEAD if await self._found_dead(actor_name) else Loss.UNREACHABLE
            reached = error.may_have_reached
            raise ReplicaLost(replica_id, loss, str(error), may_have_reached=reached) from error
        return reply

    def tell_of_deaths(self, tell: Callable[[str], None]) -> None:
        self._tell_of_death = tell

    def close(self) -> None:
        for link in self._links.values():
            link.channel.close()
        self._links.clear()
        self._context.term()

    def _metadata(self, replica_id: str) -> Mapping[str, Any]:
        metadata = self.replicas().get(replica_id)
        if metadata is None:
            raise ReplicaLost(replica_id, Loss.LEAVING, "is not in its pool")
        return metadata

    def _open(self, replica_id: str) -> CallChannel:
        metadata = self._metadata(replica_id)
        channel = CallChannel(self._context, CallAddress(**metadata["calls"]), partial(self._forget, replica_id))
        self._links[replica_id] = _Link(channel, metadata["actor"])
        return channel

    def _forget(self, replica_id: str) -> None:
        """Its channel is broken: the next call opens another. Whether it has died is asked, and told."""
        start_detached(self._look_after(replica_id, self._links.pop(replica_id).actor_name))

    async def _look_after(self, replica_id: str, actor_name: str) -> None:
        if await self._found_dead(actor_name):
            self._tell_of_death(replica_id)

    async def _found_dead(self, actor_name: str) -> bool:
        """As `has_died`, asked once for all calls that were lost together."""
        if (task := self._asked.get(actor_name)) is None:
            task = asyncio.create_task(self._has_died(actor_name), context=contextvars.Context())
            self._asked[actor_name] = task
            task.add_done_callback(lambda _: self._asked.pop(actor_name))
        return await asyncio.shield(task)
