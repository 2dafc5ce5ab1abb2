"""Calls to the replicas of one pool, each to a named one."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, overload

import zmq

from cluster.routing.call_channel import CallChannel, ChannelBroken
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.target_lost import ReplicaDied, ReplicaGone, ReplicaUnreachable
from replicas.channels.call_wire import CallAddress, Decoder, encode
from replicas.messages import GenerateCall, GenerateReply, PrefillCall, PrefillReply

# All that is sent are importable classes: plain pickle, not Serve's default, which also takes code along.
_BY_VALUE: dict[str, Any] = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}
_ASK_RAY_S = 1.0
_MAX_SOCKETS = 65_536  # three a channel
_REPLIES: dict[type, Decoder[Any]] = {GenerateCall: Decoder(GenerateReply), PrefillCall: Decoder(PrefillReply)}


class ReplicaLost(Exception):
    """The replica died or left before it answered: the call may be tried on another.

    is_dead: its process has ended. has_left: it is leaving its pool, and nothing was begun there. is_unreachable: it
    could not be reached, dead or not.
    """

    def __init__(
        self, replica_id: str, detail: str, is_dead: bool, has_left: bool = False, is_unreachable: bool = False
    ) -> None:
        super().__init__(replica_id, detail, is_dead, has_left, is_unreachable)
        self.replica_id, self.detail = replica_id, detail
        self.is_dead, self.has_left, self.is_unreachable = is_dead, has_left, is_dead or is_unreachable

    def __str__(self) -> str:
        return f"replica {self.replica_id}: {self.detail}"


class PoolClient(ABC):
    """One pool as the router sees it."""

    @abstractmethod
    def replicas(self) -> ReplicaTable:
        """Replica id -> published metadata, of the replicas that take work now."""

    @overload
    async def submit(self, replica_id: str, call: GenerateCall) -> GenerateReply: ...

    @overload
    async def submit(self, replica_id: str, call: PrefillCall) -> PrefillReply: ...

    @abstractmethod
    async def submit(self, replica_id: str, call: GenerateCall | PrefillCall) -> GenerateReply | PrefillReply:
        """A request's part at this replica, for as long as it takes. Cancelling this ends it there.

        Raises ReplicaLost; CallFailed when something broke at the replica; NotSendable.
        """

    @abstractmethod
    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        """Anything else. The method's result. Cancelling this cancels the method at the replica.

        Raises ReplicaLost, also when somebody else cancelled it there; and whatever the method raised.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing to close
        """No calls any more. On the event loop that made them; those that are open fail."""


class ServePool(PoolClient):
    """A pool behind a Serve handle whose deployment routes by `TargetRouter`.

    Requests go by a channel of our own to each replica, which Serve tells of. All else are Serve calls, by its own gRPC
    in every mode, not as Ray actor calls: the same path everywhere, at half the cost. What they send and answer is
    bounded by RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH.
    """

    def __init__(self, handle: Any, deployment: str) -> None:
        self._handle = handle
        self._deployment = deployment
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._channels: dict[str, CallChannel] = {}
        self._asked: dict[str, asyncio.Task[bool]] = {}

    def replicas(self) -> ReplicaTable:
        from cluster.routing import replica_registry

        return replica_registry.REGISTRY.replicas(self._deployment)

    async def submit(self, replica_id: str, call: Any) -> Any:
        payload = encode(call)
        try:
            channel = self._channels.get(replica_id) or self._open(replica_id)
            reply = await channel.call(call.request.request_id, payload)
        except ChannelBroken as error:
            is_dead = await self._found_dead(replica_id, error)
            raise ReplicaLost(replica_id, str(error), is_dead, is_unreachable=True) from error
        return _REPLIES[type(call)](reply)

    def _open(self, replica_id: str) -> CallChannel:
        metadata = self.replicas().get(replica_id)
        if metadata is None:
            raise ReplicaLost(replica_id, "is not in its pool", is_dead=False, has_left=True)
        channel = CallChannel(self._context, CallAddress(**metadata["calls"]), partial(self._forget, replica_id))
        self._channels[replica_id] = channel
        return channel

    def _forget(self, replica_id: str) -> None:
        """Its channel is broken: the next call opens another."""
        del self._channels[replica_id]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._context.term()

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayActorError

        try:
            return await self._call(replica_id, method, *arguments, **_BY_VALUE)
        except ReplicaGone as error:
            raise ReplicaLost(replica_id, str(error), is_dead=False, has_left=True) from error
        except (RayActorError, ReplicaDied, ReplicaUnreachable) as error:
            is_dead = await self._found_dead(replica_id, error)
            raise ReplicaLost(replica_id, type(error).__name__, is_dead, is_unreachable=True) from error

    async def _call(self, replica_id: str, method: str, *arguments: Any, **options: Any) -> Any:
        response = self._handle.options(session_id=replica_id, method_name=method, **options).remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Serve's word for a method that was cancelled at the replica. Passed on, it would end our own task.
            raise ReplicaLost(replica_id, "the call was cancelled there", is_dead=False) from None

    async def _found_dead(self, replica_id: str, error: Exception) -> bool:
        """As `_is_dead`, asked once for all calls that were lost together."""
        if (task := self._asked.get(replica_id)) is None:
            task = asyncio.create_task(self._is_dead(replica_id, error), context=contextvars.Context())
            self._asked[replica_id] = task
            task.add_done_callback(lambda _: self._asked.pop(replica_id))
        return await asyncio.shield(task)

    async def _is_dead(self, replica_id: str, error: Exception) -> bool:
        """Whether the process of a replica that a call did not reach, or lost, has ended. A broken connection does not
        tell; Ray does, asked by an actor call. Waits for a moment at most; in doubt it has not: one that leaves is not
        in its pool, and still ends what it has begun, perhaps for others.
        """
        from ray.exceptions import ActorDiedError

        if isinstance(error, ActorDiedError | ReplicaDied):
            return True
        try:
            async with asyncio.timeout(_ASK_RAY_S):
                await self._call(replica_id, "pulse", _by_reference=True)
        except (ActorDiedError, ReplicaDied):
            return True
        except Exception:  # nobody knows, or not in time
            return False
        return False
