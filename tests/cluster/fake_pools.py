"""Pools of scripted replicas, on the test's event loop.

Frames go through the router's real receiver, its key check, decoding, order and gap logic: only the socket is left out,
unless a cluster is made with real_channel. What is generated, and what fails, is tests/cluster/fake_model.py's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import astuple

from cluster.routing.pool_client import Loss, PoolClient, ReplicaLost
from cluster.routing.replica_registry import ReplicaTable
from replicas.channels.wire import encode
from replicas.messages import (
    CallStatus,
    ChannelAddress,
    ForgetPeerCall,
    Frame,
    GenerateCall,
    GenerateReply,
    KeyPosition,
    MigrateCall,
    MigrateReply,
    PrefillCall,
    PrefillReply,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
    Token,
)
from replicas.recent_part import recent_part
from scheduler.memory_budget import blocks_for_generation
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, tokens_of
from tests.cluster.fake_prefix_cache import FakePrefixCache
from tests.cluster.fake_replica import EPOCH, FakeReplica

if TYPE_CHECKING:
    from replicas.channels.token_receiver import TokenReceiver

BLOCK_SIZE = 4
_LEAVING_S = 1.0  # a replica that leaves is there for so long, like one that drains
_WHOLE: dict[type, str] = {GenerateCall: "generate", PrefillCall: "prefill", MigrateCall: "migrate"}
_METHODS: dict[type, str] = {PulseCall: "pulse", ReplayCall: "replay", ForgetPeerCall: "forget_peer"}


@dataclass(slots=True)
class Call:
    """One call of the router. end: None while it is open, then "ok", "failed" or "cancelled"."""

    replica_id: str
    method: str
    arguments: tuple[Any, ...]
    end: str | None = None


class _Reply(Exception):
    """A script's reply instead of the real one."""

    def __init__(self, status: CallStatus) -> None:
        self.status = status


class _Wire:
    """A ZeroMQ frame, as far as the receiver looks."""

    def __init__(self, frame: Frame, key: str) -> None:
        self.bytes = encode(frame)
        self._key = key

    def get(self, _: str) -> str:
        return self._key


class FakePool(PoolClient):
    """Runs `_<method>` of a subclass; records every call and how it ended."""

    def __init__(self, cluster: FakeCluster, name: str, num_replicas: int, total_blocks: int) -> None:
        self.cluster, self.name, self._total_blocks = cluster, name, total_blocks
        self.members: dict[str, FakeReplica] = {}
        self.num_replaced = 0
        self.tell_of_death: Callable[[str], None] = lambda _: None
        for i in range(num_replicas):
            self.join(f"{name}-{i}")

    def tell_of_deaths(self, tell: Callable[[str], None]) -> None:
        self.tell_of_death = tell

    def replicas(self) -> ReplicaTable:
        return {replica_id: replica.metadata() for replica_id, replica in self.members.items()}

    def replace_dead(self) -> None:
        """Whoever died leaves the table, and another is there for it."""
        for replica_id, replica in list(self.members.items()):
            if replica.death.done():
                del self.members[replica_id]
                self.num_replaced += 1
                self.join(f"{self.name}-again-{self.num_replaced}")

    def join(self, replica_id: str) -> FakeReplica:
        """One more replica."""
        is_real = self.cluster.real_channel and self.name == "decode"
        replica = FakeReplica(replica_id, self._total_blocks, self.cluster.on_sent, is_real)
        if self.cluster.has_prefix_cache:
            replica.cache = FakePrefixCache(replica.fingerprint, self._total_blocks, BLOCK_SIZE, EPOCH)
        self.members[replica_id] = replica
        return replica

    async def submit(self, replica_id: str, call: Any) -> Any:
        """As the method of a call's own name, with its fields; a request's as one."""
        if isinstance(call, GenerateCall | PrefillCall | MigrateCall):
            return await self._call(replica_id, _WHOLE[type(call)], call)
        return await self._call(replica_id, _METHODS[type(call)], *astuple(call))

    async def _call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        self.cluster.seen()
        call = Call(replica_id, method, arguments)
        if method != "pulse":  # asked by the clock, not by what a test does
            self.cluster.calls.append(call)
        replica = self.members.get(replica_id)
        if replica is None:
            call.end = "failed"
            raise ReplicaLost(replica_id, Loss.LEAVING, "is not in its pool")
        if replica.is_leaving and method in ("generate", "prefill"):
            call.end = "ok"
            return _refusal(method, replica)
        if replica.is_frozen:
            await self._hang(call)
        was_alive = not replica.death.done()
        work = asyncio.ensure_future(getattr(self, f"_{method}")(replica, *arguments))
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({work, replica.death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ReplicaLost(replica_id, Loss.DEAD, "ActorDiedError", may_have_reached=was_alive)
            result = work.result()
            call.end = "ok"
            return result
        except asyncio.CancelledError:
            call.end = "cancelled"
            raise
        finally:
            call.end = call.end or "failed"
            work.cancel()

    async def _hang(self, call: Call) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            call.end = "cancelled"

    async def _pulse(self, replica: FakeReplica, keys_from: KeyPosition | None) -> Pulse:
        log = None if replica.cache is None else replica.cache.log
        return Pulse(replica.load, replica.stalled_s, recent_part(log, keys_from))

    async def _forget_peer(self, replica: FakeReplica, agent_name: str) -> None:
        if self.cluster.forget_peer_hangs:
            await asyncio.Event().wait()

    async def _strike(self, replica: FakeReplica, script: Script, phase: Phase, steps: int = 0) -> None:
        fault = script.fault
        if fault is None or fault.phase is not phase or (phase is Phase.DECODE and fault.steps != steps):
            return
        self.cluster.struck.append(fault)
        if isinstance(fault.what, CallStatus):
            raise _Reply(fault.what)
        if fault.what == "gone":
            raise ReplicaLost(replica.replica_id, Loss.FROZEN, "has stopped answering")
        if fault.what == "raise":
            raise RuntimeError("a bug at the replica; the prompt was a secret")
        if fault.what == "cancelled":
            raise asyncio.CancelledError
        if fault.what == "frozen":
            replica.thaw.clear()
        if fault.what == "dead":
            self.cluster.kill(replica.replica_id)
        await asyncio.Event().wait()


def _refusal(method: str, replica: FakeReplica) -> GenerateReply | PrefillReply:
    if method == "generate":
        return GenerateReply(CallStatus.LEAVING, "", (), 0.0, 0.0, 0.0)
    return PrefillReply(CallStatus.LEAVING, "", (), 0.0, 0.0, replica.load)


class FakePrefill(FakePool):
    async def _prefill(self, replica: FakeReplica, call: PrefillCall) -> PrefillReply:
        script = self.cluster.scripts[call.request_id]
        await asyncio.sleep(script.prefill_s)
        try:
            await self._strike(replica, script, Phase.PREFILL)
        except _Reply as reply:
            return PrefillReply(reply.status, "scripted", (), 0.0, 0.0, replica.load)
        assert call.reader.fingerprint == replica.fingerprint, "KV never goes from one model to another"
        tokens = tokens_of(call.spec, replica.fingerprint)
        firsts = tuple(Token(call.request_id, c, 0, *of_choice[0]) for c, of_choice in tokens.items())
        handoff = self.cluster.handoffs.get(call.request_id)
        if handoff is not None and any(first.finish_reason is None for first in firsts):
            handoff.set_result(None)
        num_cached = script.cached[1] if replica.cache is None else replica.cache.take(call.spec)
        await asyncio.sleep(script.answer_s)
        return PrefillReply(CallStatus.OK, "", firsts, 0.0, script.prefill_s, replica.load, num_cached=num_cached)


class FakeDecode(FakePool):
    async def _generate(self, replica: FakeReplica, call: GenerateCall) -> GenerateReply:
        script = self.cluster.begin(call)
        sent: Counter[int] = Counter()
        status, num_cached = CallStatus.OK, 0
        try:
            with replica.queued():
                await asyncio.sleep(script.admit_s)
                await self._strike(replica, script, Phase.QUEUE)
            async with self._memory(replica, call):
                num_cached = script.cached[0] if replica.cache is None else replica.cache.take(call.spec)
                await self._send_tokens(replica, call, script, sent)
            await asyncio.sleep(script.reply_s)
            await self._strike(replica, script, Phase.REPLY)
        except _Reply as reply:
            status = reply.status
        finally:
            self.cluster.running.pop(call.request_id, None)
        sent_of = tuple(sorted(sent.items()))
        return GenerateReply(status, "scripted", sent_of, 0.0, script.transfer_s, 0.0, num_cached=num_cached)

    async def _migrate(self, replica: FakeReplica, call: MigrateCall) -> MigrateReply:
        """It stops behind its next token, if it still runs then, and the reader has where it was."""
        running = self.cluster.running
        if running.get(call.request_id) is not replica:
            return MigrateReply(CallStatus.REJECTED, "it is over, or was never here")
        try:
            await self._strike(replica, self.cluster.scripts[call.request_id], Phase.MOVE)
        except _Reply as reply:
            return MigrateReply(reply.status, "scripted")
        assert call.reader.fingerprint == replica.fingerprint, "KV never goes from one model to another"
        self.cluster.stops[call.request_id] = call.transfer_id
        while call.request_id in running:
            await asyncio.sleep(0.0001)  # not 0: where waits are skipped, time stands still while anybody is busy
        is_stopped = self.cluster.stops.pop(call.request_id, None) is None
        return MigrateReply(CallStatus.OK if is_stopped else CallStatus.REJECTED, "")

    def _stop(self, call: GenerateCall, index: int) -> None:
        """If it is to. Its blocks are offered: where it goes on from."""
        transfer_id = self.cluster.stops.pop(call.request_id, None)
        if transfer_id is None:
            return
        handoff = self.cluster.handoffs.get(transfer_id)
        if handoff is not None and not handoff.done():
            handoff.set_result(index)
        raise _Reply(CallStatus.MOVED)

    async def _send_tokens(self, replica: FakeReplica, call: GenerateCall, script: Script, sent: Counter[int]) -> None:
        tokens, first = tokens_of(call.spec, replica.fingerprint), 0
        if call.source is not None:
            assert call.source.fingerprint == replica.fingerprint, "KV never comes from another model"
            await self._strike(replica, script, Phase.ADMITTED)
            gone_on = await self.cluster.handoffs[call.request_id]
            assert (gone_on is not None) == (call.num_generated > 0)
            first = gone_on or 1
            await asyncio.sleep(script.transfer_s)
        # In a split system it is a handoff that hangs. An engine that does is frozen, which is something else.
        is_local = call.source is None and self.cluster.prefill is not None
        if not is_local or script.fault is None or script.fault.what != "hang":
            await self._strike(replica, script, Phase.TRANSFER)
        self.cluster.running[call.request_id] = replica
        for step, index in enumerate(range(first, max(map(len, tokens.values())))):
            await self._strike(replica, script, Phase.DECODE, step)
            now = [Token(call.request_id, c, index, *t[index]) for c, t in tokens.items() if index < len(t)]
            sent.update(item.choice for item in now)
            cached = ((call.request_id, script.cached[0]),) if step == 0 and script.cached[0] else ()
            drafted = tuple((call.request_id, *counts) for counts in script.drafted[step : step + 1])
            await replica.send(call.channel, tokens=tuple(now), cached=cached, drafted=drafted)
            await asyncio.sleep(script.token_s)
            if index + 1 < max(map(len, tokens.values())):
                self._stop(call, index + 1)

    @asynccontextmanager
    async def _memory(self, replica: FakeReplica, call: GenerateCall) -> AsyncIterator[None]:
        """Wait for memory; say that it is there; afterwards that it is free again."""
        spec, request_id = call.spec, call.request_id
        blocks = blocks_for_generation(spec.prompt_len, spec.max_tokens, len(spec.choices), BLOCK_SIZE)
        assert blocks <= replica.total_blocks, "the router lets nothing pass that never fits"
        with replica.queued():
            while replica.used_blocks + blocks > replica.total_blocks:
                await asyncio.sleep(0.001)
        self.cluster.handoffs[request_id] = asyncio.get_running_loop().create_future()
        try:
            with replica.promised(blocks):
                await replica.send(call.channel, admitted=(request_id,))
                yield
        finally:
            del self.cluster.handoffs[request_id]
            await replica.send(call.channel)

    async def _replay(self, replica: FakeReplica, router_id: str, from_seq: int) -> ReplayReply:
        await asyncio.sleep(0)
        if self.cluster.replay == "hang":
            await asyncio.Event().wait()
        if self.cluster.replay == "gone":
            return ReplayReply(())
        if self.cluster.replay == "wrong":
            from_seq += 1
        to_seq = from_seq + 2 if self.cluster.replay == "short" else None
        return ReplayReply(tuple(map(encode, replica.rings[router_id][from_seq:to_seq])))


class FakeCluster:
    """Both pools. script: how an attempt goes, asked once for each. on_wire: the frames that arrive when one is sent.

    replay: "ok"; "short", two frames of them at a time; or how the call for missing frames fails: "gone", "hang",
    "wrong".
    """

    def __init__(
        self,
        num_decode: int = 1,
        num_prefill: int = 1,
        decode_blocks: int = 10_000,
        prefill_blocks: int = 10_000,
        real_channel: bool = False,
        has_prefix_cache: bool = False,
    ) -> None:
        self.real_channel, self.has_prefix_cache = real_channel, has_prefix_cache
        self.calls: list[Call] = []
        self.struck: list[Fault] = []
        self.scripts: dict[str, Script] = {}
        self.requests: list[GenerateCall] = []
        self.handoffs: dict[str, asyncio.Future[int | None]] = {}  # of one that moves: how many tokens it has
        self.running: dict[str, FakeReplica] = {}  # who decodes
        self.stops: dict[str, str] = {}  # who is to stop, and for which transfer
        self.script: Callable[[GenerateCall], Script] = lambda _: PLAIN
        self.on_wire: Callable[[Frame], Iterable[Frame]] = lambda frame: (frame,)
        self.replay = "ok"
        self.forget_peer_hangs = False
        self.seen: Callable[[], None] = lambda: None  # called with every call, in its context
        self.receiver: TokenReceiver | None = None
        self._leavers: dict[FakeReplica, float] = {}  # of decode, and until when each is there
        self.decode = FakeDecode(self, "decode", num_decode, decode_blocks)
        self.prefill = FakePrefill(self, "prefill", num_prefill, prefill_blocks) if num_prefill else None

    @property
    def pools(self) -> list[FakePool]:
        return [self.decode, self.prefill] if self.prefill else [self.decode]

    def play(self, *scripts: Script) -> None:
        """The first attempts go by these, all later ones plainly."""
        left = list(scripts)
        self.script = lambda _: left.pop(0) if left else PLAIN

    def fail(self, *faults: Fault) -> None:
        """The first attempts meet these faults, later ones none."""
        self.play(*(Script(fault) for fault in faults))

    def begin(self, call: GenerateCall) -> Script:
        assert call.request_id not in self.scripts, "an attempt has an id of its own"
        self.requests.append(call)
        self.scripts[call.request_id] = self.script(call)
        return self.scripts[call.request_id]

    def of(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def kill(self, replica_id: str) -> None:
        """Its calls fail and it sends nothing more. As in Serve it stays in the table until somebody removes it."""
        there = [*(replica for pool in self.pools for replica in pool.members.values()), *self._leavers]
        (replica,) = (replica for replica in there if replica.replica_id == replica_id)
        if not replica.death.done():
            replica.death.set_result(None)

    def remove(self, replica_id: str) -> FakeReplica:
        """It takes no new calls; what runs there goes on."""
        (pool,) = (pool for pool in self.pools if replica_id in pool.members)
        replica = pool.members.pop(replica_id)
        if pool is self.decode and not replica.death.done():
            self._leavers[replica] = asyncio.get_running_loop().time() + _LEAVING_S
        return replica

    async def signs_of_life(self, channel: ChannelAddress) -> None:
        """A frame without items of each decode replica, as idle engines send: it shows what went missing before."""
        now_s = asyncio.get_running_loop().time()
        self._leavers = {replica: end_s for replica, end_s in self._leavers.items() if now_s < end_s}
        for replica in [*self.decode.members.values(), *self._leavers]:
            if not replica.is_frozen:
                await replica.send(channel)

    def on_sent(self, replica: FakeReplica, frame: Frame) -> None:
        for arrived in self.on_wire(frame):
            self.deliver(replica, arrived)

    def deliver(self, replica: FakeReplica, frame: Frame) -> None:
        if self.receiver is not None:
            self.receiver._take([_Wire(frame, replica.public_key)])  # type: ignore[list-item]

    def close(self) -> None:
        for replica in self.decode.members.values():
            if replica.sender is not None:
                replica.sender.shut_down(linger_s=0)
