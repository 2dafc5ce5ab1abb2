"""What the router knows of the replicas, and the pool behind a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

import pytest

from cluster.routing.call_channel import CallChannel
from cluster.routing.pool_client import ReplicaLost, ServePool
from cluster.routing.pool_view import PoolView
from cluster.routing.replica_registry import ReplicaRegistry, ReplicaTable
from cluster.routing.routing_policy import DecodeCandidate, PrefillCandidate
from replicas.channels.call_server import CallServer
from replicas.channels.call_wire import Decoder
from replicas.messages import (
    ChannelAddress,
    EngineLoad,
    Frame,
    GenerateCall,
    GenerateReply,
    GenerationRequest,
    TransferPeer,
)
from scheduler.sampling_params import SamplingParams
from tests.cluster.router_rig import until


def metadata(replica_id: str) -> dict[str, Any]:
    peer = TransferPeer(replica_id, "e", f"agent-{replica_id}", b"\x00m", "", 100, 1)
    return {"num_blocks": 100, "peer": peer.to_metadata()}


def load(free: int = 100, queued: int = 0, tokens: int = 0, **more: Any) -> EngineLoad:
    return EngineLoad(1, queued, tokens, free, 100, 0.0, **more)


def frame(replica_id: str, of: EngineLoad) -> Frame:
    return Frame(replica_id, "e", 0, of, (), ())


class Pools:
    def __init__(self) -> None:
        self.decodes = {"d": metadata("d")}
        self.prefills = {"p": metadata("p")}
        self.now_s = 50.0
        self.view = PoolView(lambda: self.decodes, lambda: self.prefills, lambda: self.now_s)

    @property
    def decode(self) -> DecodeCandidate:
        (candidate,) = self.view.decode_candidates()
        return candidate

    @property
    def prefill(self) -> PrefillCandidate:
        (candidate,) = self.view.prefill_candidates()
        return candidate


def test_room_is_what_was_heard_less_what_was_sent_since() -> None:
    pools = Pools()
    assert pools.decode == DecodeCandidate("d", 100, 100, 0, 0), "nothing heard: all of it"
    pools.view.heard(frame("d", load(free=60, queued=2)))
    assert pools.decode == DecodeCandidate("d", 100, 60, 0, 2)
    pools.view.sent("d", 50, must_wait=False)
    pools.view.sent("d", 30, must_wait=True)
    assert pools.decode == DecodeCandidate("d", 100, -20, 2, 2)
    assert pools.view.num_waiting == 1
    pools.view.heard(frame("d", load(free=10)))
    pools.view.admitted("d", 50, must_wait=False)
    assert pools.decode == DecodeCandidate("d", 100, -20, 2, 0)
    pools.view.ended("d")
    pools.view.admitted("d", 30, must_wait=True)
    pools.view.ended("d")
    assert pools.decode == DecodeCandidate("d", 100, 10, 0, 0)
    assert pools.view.num_waiting == 0


def test_the_queue_at_prefill_is_the_longer_of_what_it_says_and_what_we_sent() -> None:
    pools = Pools()
    pools.view.prompt_sent("p", 70)
    assert pools.prefill.queued_tokens == 70
    pools.view.heard_load("p", load(tokens=90))
    assert pools.prefill.queued_tokens == 90
    pools.view.prompt_sent("p", 50)
    assert pools.prefill.queued_tokens == 120
    for num_tokens in (70, 50):
        pools.view.prompt_answered("p", num_tokens)
    assert pools.prefill.queued_tokens == 90


def test_what_decode_projects_is_passed_on_less_what_was_sent_since() -> None:
    pools = Pools()
    pools.view.heard(frame("d", load(free=60, later_free_blocks=(70, 80), expected_tokens=30)))
    pools.view.sent("d", 50, must_wait=False)
    assert pools.decode == DecodeCandidate("d", 100, 10, 1, 0, (20, 30), 30, 0.0)


def test_candidates_say_on_which_node_they_are() -> None:
    table = {"x": metadata("d") | {"node_id": "n1"}}
    view = PoolView(lambda: table, lambda: table)
    for _ in range(2):  # before and after they are heard
        assert [candidate.node_id for candidate in view.decode_candidates() + view.prefill_candidates()] == ["n1"] * 2
        view.heard_load("x", load())


def test_prefill_works_off_what_waits_there_while_nothing_is_heard_but_not_what_we_wait_for() -> None:
    pools = Pools()
    pools.view.heard_load("p", load(tokens=90, prefill_tokens_per_s=10.0))
    assert pools.prefill == PrefillCandidate("p", 100, 90, 10.0)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 50
    pools.view.prompt_sent("p", 30)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 30
    pools.view.prompt_answered("p", 30)
    pools.now_s += 4.0
    assert pools.prefill.queued_tokens == 0


def test_a_prompt_counts_at_prefill_from_when_it_is_routed_there() -> None:
    """Else all that come until decode has admitted the first one would follow it."""
    pools = Pools()
    pools.view.prompt_coming("p", 30)
    pools.view.prompt_coming("p", 5)
    assert (pools.prefill.queued_tokens, pools.view.sent_prompt_tokens) == (35, 0)
    pools.view.heard_load("p", load(tokens=90))
    assert pools.prefill.queued_tokens == 125
    pools.view.prompt_came("p", 30)
    pools.view.prompt_sent("p", 30)
    assert (pools.prefill.queued_tokens, pools.view.sent_prompt_tokens) == (95, 30)
    pools.view.prompt_came("p", 5)
    assert pools.prefill.queued_tokens == 90


TWICE: dict[str, Callable[[PoolView], None]] = {
    "admitted": lambda view: view.admitted("d", 5, must_wait=True),
    "came": lambda view: view.prompt_came("p", 5),
    "answered": lambda view: view.prompt_answered("p", 5),
    "ended": lambda view: view.ended("d"),
}


@pytest.mark.parametrize("call", TWICE)
def test_counting_down_twice_is_our_bug_and_noticed(call: str) -> None:
    view = Pools().view
    view.sent("d", 5, must_wait=True)
    view.prompt_coming("p", 5)
    view.prompt_came("p", 5)
    view.prompt_sent("p", 5)
    view.admitted("d", 5, must_wait=True)
    view.prompt_answered("p", 5)
    view.ended("d")
    with pytest.raises(AssertionError):
        TWICE[call](view)


def test_a_replica_that_left_is_no_candidate_and_no_peer() -> None:
    pools = Pools()
    pools.view.sent("d", 5, must_wait=False)
    pools.decodes.clear()
    pools.prefills.clear()
    assert pools.view.decode_candidates() == pools.view.prefill_candidates() == []
    with pytest.raises(KeyError):
        pools.view.decode_peer("d")
    with pytest.raises(KeyError):
        pools.view.prefill_peer("p")
    pools.view.admitted("d", 5, must_wait=False)  # its last request may still end there
    pools.view.ended("d")


def test_a_dead_replica_is_forgotten_once_and_its_agent_named_if_anybody_used_it() -> None:
    pools = Pools()
    pools.view.decode_candidates()
    assert pools.view.decode_peer("d").address == b"\x00m"
    pools.view.heard(frame("d", load(free=1)))
    assert pools.view.forget("d") == "agent-d"
    assert pools.view.forget("d") is None
    assert pools.view.forget("p") is None
    assert pools.decode.free_blocks == 100


def test_the_registry_tells_of_replicas_that_have_published_something() -> None:
    registry = ReplicaRegistry()
    registry.update("decode", {"a": {"num_blocks": 1}})
    heard: list[tuple[str, ReplicaTable]] = []
    registry.listen(lambda deployment, table: heard.append((deployment, table)))
    registry.update("decode", {"a": {"num_blocks": 1}, "new": {}})
    registry.update("prefill", {})
    only_a = {"a": {"num_blocks": 1}}
    assert heard == [("decode", only_a), ("decode", only_a), ("prefill", {})]
    assert (registry.replicas("decode"), registry.replicas("unheard of")) == (only_a, {})


# -- Serve's calls ---------------------------------------------------------------------------------


class FakeResponse:
    """A Serve response that ends with an exception, or never."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.is_cancelled = error, False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        if self.error is not None:
            raise self.error
        return (yield from asyncio.Event().wait().__await__())


class FakeHandle:
    """A Serve handle: every call gets the one response, an actor call the other if there is one."""

    def __init__(self, response: FakeResponse, by_reference: FakeResponse | None = None) -> None:
        self.response, self.by_reference = response, by_reference or response

    def options(self, *, _by_reference: bool, **_: str) -> FakeHandle:
        return FakeHandle(self.by_reference) if _by_reference else self

    def remote(self, *_: object) -> FakeResponse:
        return self.response


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import
async def test_serve_cancels_by_itself_or_for_us() -> None:
    """A CancelledError that nobody here asked for must not end the task it comes up in."""
    with pytest.raises(ReplicaLost, match="cancelled there"):
        await ServePool(FakeHandle(FakeResponse(asyncio.CancelledError())), "decode").call("r", "generate")
    response = FakeResponse(None)
    call = asyncio.create_task(ServePool(FakeHandle(response), "decode").call("r", "generate"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert response.is_cancelled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_serve_says_who_is_lost() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from cluster.routing.target_lost import ReplicaDied, ReplicaGone, ReplicaUnreachable

    broken = ActorUnavailableError("m", b"x" * 16)
    # What the call ended with, and the actor call that asks Ray about it; whether it is dead, has left, is unreachable.
    cases: list[tuple[BaseException, BaseException | None, tuple[bool, bool, bool]]] = [
        (ReplicaGone("r"), None, (False, True, False)),
        (broken, None, (False, False, True)),
        (broken, ReplicaGone("r"), (False, False, True)),  # it leaves: Serve has taken it off the list
        (broken, ReplicaDied("r"), (True, False, True)),
        (broken, ActorDiedError(), (True, False, True)),
        (broken, asyncio.CancelledError(), (False, False, True)),
        (ReplicaUnreachable("r"), ReplicaUnreachable("r"), (False, False, True)),
        (ReplicaUnreachable("r"), ReplicaGone("r"), (False, False, True)),
        (ReplicaUnreachable("r"), ReplicaDied("r"), (True, False, True)),
        (ReplicaDied("r"), None, (True, False, True)),
        (ActorDiedError(), None, (True, False, True)),
    ]
    for error, asked, expected in cases:
        handle = FakeHandle(FakeResponse(error), FakeResponse(asked or error))
        with pytest.raises(ReplicaLost) as caught:
            await ServePool(handle, "decode").call("r", "generate")
        lost = caught.value
        assert (lost.replica_id, lost.is_dead, lost.has_left, lost.is_unreachable) == ("r", *expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("has_died", [False, True])
async def test_a_connection_to_one_that_leaves_may_break(has_died: bool) -> None:
    """A replica that drains is off the list, like a dead one. Its leases are others' streams: they must go on."""
    from cluster.routing.target_lost import ReplicaDied, ReplicaGone

    asked = ReplicaDied("r") if has_died else ReplicaGone("r")
    pool = ServePool(FakeHandle(FakeResponse(asked)), "decode")
    engine: dict[str, Future[GenerateReply]] = {}

    def start(call: GenerateCall) -> Future[GenerateReply]:
        return engine.setdefault(call.request.request_id, Future())

    server = CallServer("127.0.0.1", Decoder(GenerateCall), start, lambda request_id: None)
    server.start()
    pool._channels["r"] = CallChannel(pool._context, server.address, lambda: pool._forget("r"))
    request = GenerationRequest("a", (1,), (0,), 1, frozenset(), SamplingParams(temperature=0.0), 10.0)
    call = asyncio.create_task(pool.submit("r", GenerateCall(request, ChannelAddress("x", "y", "z"), None)))
    await until(lambda: bool(engine))
    await asyncio.to_thread(server.stop)
    with pytest.raises(ReplicaLost) as caught:
        await call
    assert (caught.value.is_dead, caught.value.has_left, caught.value.is_unreachable) == (has_died, False, True)
    pool.close()
