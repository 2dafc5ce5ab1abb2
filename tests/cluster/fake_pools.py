"""Pools of scripted replicas on the test's event loop, and a router in front of them that is checked to end at zero.

Their "model" is a function of all that a token may depend on (design law 5), so a retry that replays the right history
gives the same tokens as an undisturbed run, and any other does not. Frames go through the router's real receiver: its
key check, decoding, order and gap logic; only the socket is left out, unless a cluster is made with real_channel.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import zmq

from cluster.attempt import AttemptLimits
from cluster.generation import GeneratedToken, GenerationSpec
from cluster.ingress_metrics import IngressMetrics
from cluster.pool_client import PoolClient, ReplicaLost
from cluster.replica_registry import ReplicaTable
from cluster.router import Router, RouterLimits
from cluster.routing_policy import RoutingRules
from replicas.messages import (
    CallStatus,
    ChannelAddress,
    EngineLoad,
    FinishReason,
    FirstToken,
    Frame,
    GenerateCall,
    GenerateReply,
    GenerationRequest,
    PrefillCall,
    PrefillReply,
    TokenItem,
    TransferPeer,
)
from replicas.token_sender import FrameGone, TokenSender
from replicas.wire import encode_frame
from scheduler.memory_budget import blocks_for_generation, num_blocks_for
from scheduler.sampling_params import SamplingParams

BLOCK_SIZE = 4
VOCABULARY = 97
SETTLE_S = 5.0
Token = tuple[int, FinishReason | None]


def spec_of(
    *prompt_ids: int, n: int = 1, max_tokens: int = 8, stop: Iterable[int] = (), seed: int = 7, **values: Any
) -> GenerationSpec:
    """A spec whose choices part with their first token; temperature=0.0 keeps them together."""
    temperature, timeout_s = values.get("temperature", 1.0), values.get("timeout_s", 20.0)
    sampling = SamplingParams(temperature, 0, 1.0, seed)
    return GenerationSpec("g", prompt_ids or (1, 2, 3, 4, 5), n, max_tokens, frozenset(stop), sampling, timeout_s)


def model_tokens(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, choice: int, max_tokens: int, stop: frozenset[int]
) -> list[Token]:
    """All tokens of one choice, the last with its finish reason."""
    noise = () if sampling.is_greedy else (sampling.seed, choice)
    history, tokens = prompt_ids, list[Token]()
    while not tokens or tokens[-1][1] is None:
        token_id = hash((history, len(history), noise)) % VOCABULARY
        history = (*history, token_id)
        length = FinishReason.LENGTH if len(tokens) + 1 == max_tokens else None
        tokens.append((token_id, FinishReason.STOP if token_id in stop else length))
    return tokens


def undisturbed(spec: GenerationSpec) -> dict[int, list[Token]]:
    """What a client must get, whatever happens on the way."""
    given = spec.max_tokens, spec.stop_token_ids
    return {c: model_tokens(spec.prompt_ids, spec.sampling, c, *given) for c in range(spec.num_choices)}


class Phase(StrEnum):
    """Where a fault strikes: before admission; in the prefill call; after the handoff (or, without one, before the
    first token); after `Fault.steps` frames with tokens; after the last of them."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    REPLY = "reply"


@dataclass(frozen=True, slots=True)
class Fault:
    """what: a status to reply, or "gone", "dead" (the whole replica), "hang", "raise", "cancelled"."""

    phase: Phase
    what: CallStatus | str
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Script:
    """How one attempt goes. answer_s: from handoff to prefill's answer; reply_s: from last frame to decode's reply."""

    fault: Fault | None = None
    admit_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    transfer_s: float = 0.0
    token_s: float = 0.0
    reply_s: float = 0.0


PLAIN = Script()


@dataclass(slots=True)
class Call:
    """One call of the router. end: None while it is open, then "ok", "failed" or "cancelled"."""

    replica_id: str
    method: str
    arguments: tuple[Any, ...]
    end: str | None = None


class _Reply(Exception):
    def __init__(self, status: CallStatus) -> None:
        self.status = status


class _Wire(bytes):
    """A ZeroMQ frame, as far as the receiver looks."""

    key = ""

    @property
    def bytes(self) -> bytes:  # type: ignore[valid-type]
        return bytes(self)

    def get(self, _: str) -> str:
        return self.key


@dataclass(slots=True)
class FakeReplica:
    """total_blocks are promised to requests in the order in which memory comes free."""

    replica_id: str
    total_blocks: int
    real_channel: bool
    used_blocks: int = 0
    num_queued: int = 0
    death: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    rings: defaultdict[str, list[Frame]] = field(default_factory=lambda: defaultdict(list))
    sender: TokenSender | None = None
    key: str = ""

    def __post_init__(self) -> None:
        self.sender = TokenSender(self.replica_id, "e1") if self.real_channel else None
        self.key = self.sender.public_key if self.sender else zmq.curve_keypair()[0].decode()

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(1, self.num_queued, 0, self.total_blocks - self.used_blocks, self.total_blocks, 0.001)

    def metadata(self) -> dict[str, Any]:
        peer = TransferPeer(
            self.replica_id, "e1", f"agent-{self.replica_id}", b"m", "f", 0, 0, "DRAM", self.total_blocks, 1
        )
        return {"num_blocks": self.total_blocks, "channel_public_key": self.key, "peer": peer.to_metadata()}


class FakePool(PoolClient):
    """Runs `_<method>` of a subclass; records every call and how it ended."""

    def __init__(self, cluster: FakeCluster, name: str, num_replicas: int, total_blocks: int) -> None:
        self.cluster = cluster
        ids = [f"{name}-{i}" for i in range(num_replicas)]
        self.members = {i: FakeReplica(i, total_blocks, cluster.real_channel and name == "decode") for i in ids}

    def replicas(self) -> ReplicaTable:
        return {replica_id: replica.metadata() for replica_id, replica in self.members.items()}

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        call = Call(replica_id, method, arguments)
        self.cluster.calls.append(call)
        replica = self.members.get(replica_id)
        if replica is None:
            call.end = "failed"
            raise ReplicaLost(replica_id, "is not in its pool", is_dead=False)
        work = asyncio.ensure_future(getattr(self, f"_{method}")(replica, *arguments))
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({work, replica.death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ReplicaLost(replica_id, "ActorDiedError", is_dead=True)
            result = work.result()
            call.end = "ok"
            return result
        except asyncio.CancelledError:
            call.end = "cancelled"
            raise
        finally:
            call.end = call.end or "failed"
            work.cancel()

    async def _forget_peer(self, replica: FakeReplica, agent_name: str) -> None:
        pass

    async def _strike(self, replica: FakeReplica, script: Script, phase: Phase, steps: int = 0) -> None:
        fault = script.fault
        if fault is None or fault.phase is not phase or (phase is Phase.DECODE and fault.steps != steps):
            return
        self.cluster.struck.append(fault)
        if isinstance(fault.what, CallStatus):
            raise _Reply(fault.what)
        if fault.what == "gone":
            raise ReplicaLost(replica.replica_id, "has left", is_dead=False)
        if fault.what == "raise":
            raise RuntimeError("a bug at the replica, secret-prompt-text")
        if fault.what == "cancelled":
            raise asyncio.CancelledError
        if fault.what == "dead":
            self.cluster.kill(replica.replica_id)
        await asyncio.Event().wait()


class FakePrefill(FakePool):
    async def _prefill(self, replica: FakeReplica, call: PrefillCall) -> PrefillReply:
        request, script = call.request, self.cluster.scripts[call.request.request_id]
        await asyncio.sleep(script.prefill_s)
        try:
            await self._strike(replica, script, Phase.PREFILL)
        except _Reply as reply:
            return PrefillReply(reply.status, "scripted", (), 0.0, 0.0, replica.load)
        firsts = tuple(FirstToken(c, *tokens[0]) for c, tokens in _all_tokens(request).items())
        if any(first.finish_reason is None for first in firsts):
            self.cluster.handoffs[request.request_id].set_result(None)
        await asyncio.sleep(script.answer_s)
        return PrefillReply(CallStatus.OK, "", firsts, 0.0, 0.0, replica.load)


class FakeDecode(FakePool):
    async def _generate(self, replica: FakeReplica, call: GenerateCall) -> GenerateReply:
        script = self.cluster.begin(call.request)
        sent: Counter[int] = Counter()
        status = CallStatus.OK
        try:
            with self._queued(replica):
                await asyncio.sleep(script.admit_s)
                await self._strike(replica, script, Phase.QUEUE)
            async with self._memory(replica, call):
                await self._tokens(replica, call, script, sent)
            await asyncio.sleep(script.reply_s)
            await self._strike(replica, script, Phase.REPLY)
        except _Reply as reply:
            status = reply.status
        return GenerateReply(status, "scripted", tuple(sorted(sent.items())), 0.0, 0.0, 0.0)

    async def _tokens(self, replica: FakeReplica, call: GenerateCall, script: Script, sent: Counter[int]) -> None:
        request = call.request
        await self._send(replica, call.channel, (request.request_id,), ())
        tokens = _all_tokens(request)
        if call.source is not None:
            await self.cluster.handoffs[request.request_id]
            await asyncio.sleep(script.transfer_s)
        await self._strike(replica, script, Phase.TRANSFER)
        first = 0 if call.source is None else 1
        for step, index in enumerate(range(first, max(map(len, tokens.values())))):
            await self._strike(replica, script, Phase.DECODE, step)
            now = [TokenItem(request.request_id, c, index, *t[index]) for c, t in tokens.items() if index < len(t)]
            sent.update(item.choice for item in now)
            await self._send(replica, call.channel, (), tuple(now))
            await asyncio.sleep(script.token_s)

    async def _send(
        self, replica: FakeReplica, channel: ChannelAddress, admitted: tuple[str, ...], tokens: tuple[TokenItem, ...]
    ) -> None:
        if replica.sender is not None:
            replica.sender.open(channel)
            replica.sender.send(channel.router_id, replica.load, admitted, tokens)
            while replica.sender.has_unsent:
                await asyncio.sleep(0.001)
                replica.sender.flush()
            return
        ring = replica.rings[channel.router_id]
        frame = Frame(replica.replica_id, "e1", len(ring), replica.load, admitted, tokens)
        ring.append(frame)
        for arrived in self.cluster.on_wire(frame):
            self.cluster.deliver(arrived)

    @contextmanager
    def _queued(self, replica: FakeReplica) -> Iterator[None]:
        replica.num_queued += 1
        try:
            yield
        finally:
            replica.num_queued -= 1

    @asynccontextmanager
    async def _memory(self, replica: FakeReplica, call: GenerateCall) -> AsyncIterator[None]:
        request = call.request
        blocks = blocks_for_generation(len(request.prompt_ids), request.max_tokens, len(request.choices), BLOCK_SIZE)
        assert blocks <= replica.total_blocks, "the router lets nothing pass that never fits"
        with self._queued(replica):
            while replica.used_blocks + blocks > replica.total_blocks:
                await asyncio.sleep(0.001)
        replica.used_blocks += blocks
        self.cluster.handoffs[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            replica.used_blocks -= blocks
            del self.cluster.handoffs[request.request_id]
            self.cluster.deliver_load(replica, call.channel)

    async def _replay(self, replica: FakeReplica, router_id: str, from_seq: int) -> list[Frame]:
        await asyncio.sleep(0)
        if self.cluster.replay == "hang":
            await asyncio.Event().wait()
        if self.cluster.replay == "gone":
            raise FrameGone(router_id, from_seq, from_seq + 1)
        if self.cluster.replay == "wrong":
            from_seq += 1
        return replica.rings[router_id][from_seq:]
