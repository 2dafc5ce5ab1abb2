"""What the Serve replicas of both kinds of engine have in common: start, calls, metadata, health, metrics, drain, end.

How one leaves: Serve takes it off the routers' tables and waits for `__del__`; that takes no new calls, and waits for
those that are open and for the readers of what it computed. Routers hear of it in its frames, and move what runs there
to other replicas. All of it within `drain_timeout_s`, when Serve kills the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from abc import ABC
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from replicas.channels.call_server import CallServer
from replicas.channels.listening import node_address
from replicas.channels.token_sender import FrameGone
from replicas.channels.wire import Decoder
from replicas.engine.engine_watch import EngineWatch, Watched
from replicas.messages import (
    Call,
    CallStatus,
    ForgetPeerCall,
    GenerateCall,
    GenerateReply,
    MigrateCall,
    PrefillCall,
    PrefillReply,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
)
from replicas.recent_part import recent_part
from replicas.settings import EngineSettings

if TYPE_CHECKING:
    from replicas.metrics.metric_set import FamilySnapshot

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
_END_S = 4.0  # what the end of engine and calls may take

CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")


class EngineReplica(ABC, Generic[CallT, ReplyT]):
    """Loads its engine in the constructor (blocks until it can serve). Requests come by a `CallServer`."""

    calls: ClassVar[Any]  # the types of those that only this kind takes, CallT among them; with may_also all
    _has_left = True  # until it has started

    def __init__(self, settings: EngineSettings | Callable[[], EngineSettings]) -> None:
        """settings: or what finds them in this process."""
        # Imported here: a head node without torch must be able to import this module to deploy it.
        import ray
        from ray import serve

        from replicas.serving.engine_builder import build_engine
        from replicas.serving.termination import Termination
        from replicas.structured_log import configure_logging

        began_s = time.monotonic()
        settings = settings() if callable(settings) else settings
        configure_logging(settings.logging.level, settings.logging.format)
        context = ray.get_runtime_context()
        self._node_id, self._actor_name = context.get_node_id(), context.get_actor_name()
        self._built = build_engine(settings, serve.get_replica_context().replica_id.unique_id)
        self._engine = self._built.engine
        # What was loaded and compiled stays for good. To look for garbage in it, now and then, would hold up a step by
        # many times its length.
        gc.collect()
        gc.freeze()
        self._built.start()
        self._termination = Termination(settings.lifecycle.drain_timeout_s, on_request=self._engine.leave)
        self._termination.watch()
        self._calls = CallServer(node_address(), self.decoder(settings.may_also), self._take, self._engine.cancel)
        self._has_left = False
        watched = self._built.watched() | {"calls": Watched(self._calls.thread, lambda: self._calls.last_beat_s)}
        self._watch = EngineWatch(watched, settings.lifecycle.restart_after_s)
        self._calls.start()
        self._watch.start()
        self._start_s = time.monotonic() - began_s
        extra = {"event": "replica_ready", "replica": self._built.peer.replica_id}
        logger.info("ready after %.1f s", self._start_s, extra=extra)

    @classmethod
    def decoder(cls, may_also: bool = False) -> Decoder[Call[Any]]:
        """Of all calls that this kind of replica takes, and with may_also the other kind; any other is malformed."""
        kinds = GenerateCall | ReplayCall | MigrateCall | PrefillCall if may_also else cls.calls
        return Decoder(kinds | PulseCall | ForgetPeerCall)

    def _take(self, call: Call[Any]) -> Any:
        """The reply to any call, or its future. On the thread that takes calls; does not block. One that leaves refuses
        nothing but requests."""
        if isinstance(call, PulseCall):
            keys = recent_part(self._built.recent_keys, call.keys_from)
            return Pulse(self._engine.status.load, self._watch.stalled_s, keys)
        if isinstance(call, ForgetPeerCall):
            return self._built.transfers.forget_peer(call.agent_name)
        if isinstance(call, ReplayCall):
            return self._replay(call)
        if isinstance(call, MigrateCall):  # also of one that leaves: that is what it is for
            return self._engine.migrate(call)
        if isinstance(call, GenerateCall):
            return self._no_generation() if self.is_leaving else self._engine.generate(call)
        assert isinstance(call, PrefillCall), "the decoder lets no other pass"
        return self._no_prompt() if self.is_leaving else self._engine.prefill(call)

    def _no_generation(self) -> GenerateReply:
        return GenerateReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, 0.0)

    def _no_prompt(self) -> PrefillReply:
        return PrefillReply(CallStatus.LEAVING, "the replica drains", (), 0.0, 0.0, self._engine.status.load)

    def _replay(self, call: ReplayCall) -> ReplayReply:
        try:
            return ReplayReply(tuple(self._engine.sender.replay(call.router_id, call.from_seq)))
        except FrameGone as error:
            logger.warning("%s", error, extra={"event": "frames_gone", "router": call.router_id})
            return ReplayReply(())

    def record_replica_metadata(self) -> dict[str, Any]:
        """Hook of Ray Serve: pushed to every handle of this deployment, once the replica is ready."""
        where = {"node_id": self._node_id, "actor": self._actor_name, "calls": self._calls.address.to_metadata()}
        if self._engine.frames is not None:
            where["channel_public_key"] = self._engine.sender.public_key
        return {**self._built.metadata(), **where, "start_s": round(self._start_s, 1)}

    @property
    def is_leaving(self) -> bool:
        """Whether new work is refused: routers learn of it before Serve tells them."""
        return self._has_left or self._termination.is_requested

    async def metrics_snapshot(self) -> tuple[str, list[FamilySnapshot]]:
        """This replica's id and its metrics, for the ingress that was asked for /metrics."""
        return self._built.peer.replica_id, self._built.metrics_snapshot()

    def check_health(self) -> None:
        """Serve's hook: raising has this replica drained and replaced."""
        self._termination.check()
        self._built.check_health()
        if not self._calls.thread.is_alive():
            raise RuntimeError("the thread that takes this replica's calls is dead")

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Serve's hook for the end, when no router has it on its table any more; it awaits the result."""
        if self._has_left:  # not started, or the second time: by the garbage collector
            return None
        self._has_left = True
        return self._leave()

    async def _leave(self) -> None:
        """Wait for calls, for the readers of leases, and for frames to leave; then end the engine."""
        self._watch.stop()
        self._engine.leave()
        begun_s = time.monotonic()
        # Serve's clock began before, and at its end it kills: until then who still waits must be told.
        drain_timeout_s = self._built.settings.lifecycle.drain_timeout_s
        deadline_s = begun_s + max(drain_timeout_s - _END_S, drain_timeout_s / 2)
        while time.monotonic() < deadline_s:
            if self._is_drained:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        extra = {"event": "drained", "waited_s": round(time.monotonic() - begun_s, 2), "all": self._is_drained}
        logger.info("the replica leaves", extra=extra)
        await asyncio.to_thread(self._built.stop)
        await asyncio.to_thread(self._calls.stop)

    @property
    def _is_drained(self) -> bool:
        return not self._calls.num_open and self._built.is_drained
