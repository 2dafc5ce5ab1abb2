"""Calls to named replicas over real sockets, and what becomes of those that are lost. Ray's part of it is not made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from cluster.routing import actor_death, replica_registry
from cluster.routing.actor_death import has_died
from cluster.routing.call_channel import CallFailed
from cluster.routing.pool_client import Loss, ReplicaLost, ServePool
from replicas.channels.call_server import CallServer
from replicas.channels.wire import Decoder
from replicas.messages import (
    Call,
    CallStatus,
    ChannelAddress,
    EngineLoad,
    ForgetPeerCall,
    GenerateCall,
    GenerateReply,
    GenerationSpec,
    Pulse,
    PulseCall,
    ReplayCall,
    ReplayReply,
)
from scheduler.sampling_params import SamplingParams
from tests.cluster.router_rig import until

SPEC = GenerationSpec((1,), (0,), 1, frozenset(), SamplingParams(temperature=0.0))
GENERATE = GenerateCall("a", SPEC, 10.0, ChannelAddress("x", "y", "z"), None)
REPLY = GenerateReply(CallStatus.OK, "", (), 0.0, 0.0, 0.0)
PULSE = Pulse(EngineLoad(1, 2, 3, 4, 5, 0.5), 1.5)


@dataclass
class Replica:
    """Answers at once but for requests, which the test answers."""

    name: str
    told: list[Call[Any]] = field(default_factory=list)
    requests: dict[str, Future[GenerateReply]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        decode: Decoder[Call[Any]] = Decoder(GenerateCall | PulseCall | ForgetPeerCall | ReplayCall)
        self.server: CallServer[Call[Any], Any] = CallServer("127.0.0.1", decode, self._take, self.cancelled.append)
        self.server.start()

    def _take(self, call: Call[Any]) -> Any:
        self.told.append(call)
        if isinstance(call, GenerateCall):
            return self.requests.setdefault(call.request_id, Future())
        if isinstance(call, ReplayCall):
            return ReplayReply((b"frame", b"\x00\xff"))
        return PULSE if isinstance(call, PulseCall) else None

    @property
    def metadata(self) -> dict[str, Any]:
        return {"actor": f"actor-{self.name}", "calls": self.server.address.to_metadata()}


@dataclass
class Rig:
    """dead: names of actors that Ray says have died. asked: those that it was asked about."""

    pool: ServePool
    registry: replica_registry.ReplicaRegistry
    replicas: dict[str, Replica]
    dead: set[str]
    asked: list[str]

    def present(self, *names: str) -> None:
        self.registry.update("decode", {name: self.replicas[name].metadata for name in names})


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    registry = replica_registry.ReplicaRegistry()
    monkeypatch.setattr(replica_registry, "REGISTRY", registry)
    dead: set[str] = set()
    asked: list[str] = []

    async def has_died(actor_name: str) -> bool:
        asked.append(actor_name)
        await asyncio.sleep(0.01)
        return actor_name in dead

    pool = ServePool("decode", has_died)
    made = Rig(pool, registry, {name: Replica(name) for name in ("a", "b")}, dead, asked)
    made.present("a", "b")
    yield made
    for replica in made.replicas.values():
        replica.server.stop()


async def test_a_call_goes_to_the_replica_that_was_named_and_its_reply_is_typed(rig: Rig) -> None:
    assert await rig.pool.submit("b", PulseCall()) == PULSE
    assert await rig.pool.submit("b", ReplayCall("router", 7)) == ReplayReply((b"frame", b"\x00\xff"))
    assert await rig.pool.submit("a", ForgetPeerCall("agent")) is None
    assert rig.replicas["b"].told == [PulseCall(), ReplayCall("router", 7)]
    assert rig.replicas["a"].told == [ForgetPeerCall("agent")]
    rig.pool.close()


async def test_others_are_answered_while_a_request_is_open(rig: Rig) -> None:
    request = asyncio.create_task(rig.pool.submit("a", GENERATE))
    await until(lambda: bool(rig.replicas["a"].requests))
    assert await asyncio.gather(*(rig.pool.submit("a", PulseCall()) for _ in range(20))) == [PULSE] * 20
    assert rig.replicas["a"].server.num_open == 1
    rig.replicas["a"].requests["a"].set_result(REPLY)
    assert await request == REPLY
    rig.pool.close()


async def test_one_that_is_not_there_is_said_to_be_gone(rig: Rig) -> None:
    with pytest.raises(ReplicaLost, match="c: is not in its pool") as caught:
        await rig.pool.submit("c", PulseCall())
    assert caught.value.loss is Loss.LEAVING
    assert not rig.asked
    rig.pool.close()


async def test_cancelled_there_or_by_us(rig: Rig) -> None:
    """A cancellation that nobody here asked for must not end the task it comes up in, nor keep it waiting."""
    replica = rig.replicas["a"]
    call = asyncio.create_task(rig.pool.submit("a", GENERATE))
    await until(lambda: bool(replica.requests))
    replica.requests.pop("a").cancel()
    with pytest.raises(CallFailed, match="CancelledError"):
        await call
    call = asyncio.create_task(rig.pool.submit("a", GENERATE))
    await until(lambda: bool(replica.requests))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: replica.cancelled == ["a"])
    rig.pool.close()


@pytest.mark.parametrize("has_died", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_connection_that_breaks_is_death_only_on_rays_word(rig: Rig, has_died: bool, leaves: bool) -> None:
    """A replica that drains is off the list, like a dead one. Its leases are others' streams: they must go on. It is
    asked about once for all calls that are lost together."""
    replica = rig.replicas["a"]
    requests = [
        asyncio.create_task(rig.pool.submit("a", call))
        for call in (GENERATE, structs.replace(GENERATE, request_id="b"))
    ]
    await until(lambda: len(replica.requests) == 2)
    if leaves:
        rig.present("b")
        assert await rig.pool.submit("a", ReplayCall("router", 0)), "it still ends what it has begun"
    if has_died:
        rig.dead.add("actor-a")
    await asyncio.to_thread(replica.server.stop)
    for request in requests:
        with pytest.raises(ReplicaLost) as caught:
            await request
        assert caught.value.loss is (Loss.DEAD if has_died else Loss.UNREACHABLE)
        assert caught.value.may_have_reached
    assert rig.asked == ["actor-a"]
    assert await rig.pool.submit("b", PulseCall()) == PULSE
    rig.pool.close()


@pytest.mark.parametrize("has_died", [False, True])
async def test_a_death_is_told_of_though_no_call_is_open(rig: Rig, has_died: bool) -> None:
    """A prefill replica that has answered may die before its handoff goes out: decode waits for that."""
    told: list[str] = []
    rig.pool.tell_of_deaths(told.append)
    assert await rig.pool.submit("a", PulseCall()) == PULSE
    if has_died:
        rig.dead.add("actor-a")
    await asyncio.to_thread(rig.replicas["a"].server.stop)
    await until(lambda: rig.asked == ["actor-a"] and told == ["a"] * has_died)
    await asyncio.sleep(0.1)  # nobody is told once more, or of one that lives: of what never comes nobody tells
    assert told == ["a"] * has_died
    rig.pool.close()


async def test_one_that_could_not_be_reached_is_tried_again(rig: Rig) -> None:
    there = rig.replicas["a"].metadata
    nowhere = {**there, "calls": {**there["calls"], "endpoint": "tcp://127.0.0.1:1"}}
    rig.registry.update("decode", {"a": nowhere})
    for call in (PulseCall(), GENERATE):
        with pytest.raises(ReplicaLost) as caught:
            async with asyncio.timeout(120.0):
                await rig.pool.submit("a", call)
        assert caught.value.loss is Loss.UNREACHABLE
        assert not caught.value.may_have_reached
    rig.present("a")
    assert await rig.pool.submit("a", PulseCall()) == PULSE, "the next call may find it"
    rig.pool.close()


# -- Ray's word ------------------------------------------------------------------------------------


class FakeActor:
    """Its one method ends with an exception, or answers, or never does."""

    def __init__(self, end: Exception | bool | None) -> None:
        self._end = end
        self.__ray_ready__ = self

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not asked for")

    def remote(self) -> asyncio.Future[bool]:
        future = asyncio.get_running_loop().create_future()
        if isinstance(self._end, Exception):
            future.set_exception(self._end)
        elif self._end is not None:
            future.set_result(self._end)
        return future


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import
async def test_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError

    asked: list[tuple[str, str]] = []
    cases: list[tuple[Exception | bool | None, bool]] = [
        (True, False),
        (None, False),  # it stands still
        (ActorDiedError(), True),
        (ActorUnavailableError("m", b"x" * 16), False),
        (TaskCancelledError(), False),
        (RuntimeError("a bug"), False),
    ]
    for end, expected in cases:
        # Only the one that stands still spends it.
        monkeypatch.setattr(actor_death, "_ASK_S", 0.05 if end is None else 60.0)
        actor = FakeActor(end)
        monkeypatch.setattr(ray, "get_actor", lambda *of: asked.append(of) or actor)  # noqa: B023
        assert await has_died("SERVE_REPLICA::x") is expected, end
    assert set(asked) == {("SERVE_REPLICA::x", "serve")}

    def missing(*_: str) -> None:
        raise ValueError("Failed to look up actor")

    monkeypatch.setattr(ray, "get_actor", missing)
    assert await has_died("SERVE_REPLICA::x")
