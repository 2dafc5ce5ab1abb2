"""All replicas of a pool stand still, or are out of reach: requests wait for them as long as they would for room."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from cluster.routing.pool_client import Loss
from tests.cluster.fake_model import Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.fake_replica import FakeReplica
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

BOTH = ("decode", "prefill")
FROZEN_S = 0.4
QUEUE_S = 30.0
START_S = 40.0
LIMITS: dict[str, Any] = {"queue_s": QUEUE_S, "cold_start_s": 300.0, "frozen_after_s": FROZEN_S}


def members(rig: Rig, name: str) -> list[FakeReplica]:
    (pool,) = (pool for pool in rig.cluster.pools if pool.name == name)
    return list(pool.members.values())


async def freeze(rig: Rig, name: str) -> None:
    """All of them, until the router has noticed. What a start takes is known."""
    rig.router.orders.expect(dict.fromkeys(BOTH, START_S))
    rig.router.orders.wanted({name: len(members(rig, name))})
    for replica in members(rig, name):
        replica.thaw.clear()
    await until(lambda: not rig.router.usable(name))
    assert rig.router.orders.coming(name).num == 0


def thaw(rig: Rig, name: str) -> None:
    for replica in members(rig, name):
        replica.thaw.set()


def held(rig: Rig) -> float:
    return rig.router.demand.report().num_held


async def start_held(rig: Rig, num: int) -> list[tuple[Generation, asyncio.Task[Any]]]:
    started = [(one := generation_of(i, max_tokens=3, timeout_s=600.0), rig.start(one)) for i in range(num)]
    await until(lambda: held(rig) == num)
    return started


@pytest.mark.parametrize("name", BOTH)
async def test_a_short_silence_is_a_pause(name: str) -> None:
    """A process that is stopped for five seconds, a collection, a network that is away for a moment."""
    async with running_router(FakeCluster(2, 2), **LIMITS, max_retries=0) as rig:
        await freeze(rig, name)
        waiting, calls = await start_held(rig, 3), len(rig.cluster.calls)
        await asyncio.sleep(5.0)
        assert held(rig) == 3
        assert len(rig.cluster.calls) == calls, "they wait at the ingress"
        thaw(rig, name)
        for generation, task in waiting:
            assert await task == undisturbed(generation)
        assert rig.count("splitserve_request_rejections") == 0


async def test_they_go_on_as_soon_as_the_silence_is_over() -> None:
    """Nobody has to look again by the clock."""
    async with running_router(FakeCluster(), **LIMITS) as rig:
        await freeze(rig, "decode")
        ((generation, task),) = await start_held(rig, 1)
        held_until_s: list[float] = []
        back_s: list[float] = []
        recover = rig.router._decode._recover

        def recovered(replica_id: str) -> None:
            back_s.append(time.monotonic())
            recover(replica_id)

        rig.router._decode._recover = recovered  # type: ignore[method-assign]
        rig.cluster.seen = lambda: held_until_s.append(time.monotonic()) if held(rig) == 0 else None
        thaw(rig, "decode")
        assert await task == undisturbed(generation)
        assert held_until_s[0] - back_s[0] < 0.01


async def test_out_of_reach_is_a_silence_too() -> None:
    """A connection that breaks tells nobody whether the replica lives: it is asked on, and answers."""
    async with running_router(FakeCluster(num_decode=1), queue_s=QUEUE_S, max_retries=0) as rig:
        (replica,) = members(rig, "decode")
        replica.thaw.clear()
        rig.router._decode._is_dead(replica.replica_id, Loss.UNREACHABLE)
        ((generation, task),) = await start_held(rig, 1)
        thaw(rig, "decode")
        assert await task == undisturbed(generation)


@pytest.mark.parametrize("name", BOTH)
async def test_a_long_one_is_an_outage_that_says_when_to_come_back(name: str) -> None:
    async with running_router(FakeCluster(), **LIMITS) as rig:
        await freeze(rig, name)
        began_s = time.monotonic()
        with pytest.raises(ApiError, match=f"no {name} replica is available") as caught:
            await rig.tokens(generation_of(max_tokens=3, timeout_s=600.0))
        assert QUEUE_S - 0.1 <= time.monotonic() - began_s <= QUEUE_S + 1.1
        assert (caught.value.status, caught.value.code) == (503, "unavailable")
        assert caught.value.headers() == {"Retry-After": f"{START_S:.0f}"}
        assert rig.count("splitserve_request_rejections", reason="no_capacity") == 1
        thaw(rig, name)


async def test_no_more_wait_than_may() -> None:
    async with running_router(FakeCluster(), **LIMITS, max_queued=2) as rig:
        await freeze(rig, "decode")
        waiting = await start_held(rig, 2)
        with pytest.raises(ApiError, match="2 requests wait for the first decode replica to answer") as caught:
            await rig.tokens(generation_of(max_tokens=3, timeout_s=600.0))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        thaw(rig, "decode")
        for generation, task in waiting:
            assert await task == undisturbed(generation)


async def test_who_waits_is_served_by_those_that_replace_them() -> None:
    """They are given up while it waits: from then on it is as if they had died, which they have."""
    async with running_router(FakeCluster(), **LIMITS) as rig:
        await freeze(rig, "decode")
        ((generation, task),) = await start_held(rig, 1)
        await asyncio.sleep(QUEUE_S - 5.0)
        rig.cluster.kill("decode-0")
        rig.cluster.remove("decode-0")
        rig.router.pools_changed({})
        assert rig.router.orders.coming("decode").num == 1
        await asyncio.sleep(START_S)
        assert held(rig) == 1
        rig.cluster.decode.join("decode-1")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        assert await task == undisturbed(generation)


async def test_it_is_a_pause_too_for_who_has_waited_long_before() -> None:
    """For a first replica, much longer than for room: it is down only if the silence lasts."""
    async with running_router(FakeCluster(), may_be_empty=BOTH, **LIMITS, max_retries=0) as rig:
        replicas, rig.cluster.decode.members = rig.cluster.decode.members, {}
        rig.router.pools_changed({})
        rig.cluster.script = lambda _: Script(admit_s=1.0)
        ((generation, task),) = await start_held(rig, 1)
        await asyncio.sleep(2 * QUEUE_S)
        rig.cluster.decode.members = replicas
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await until(lambda: len(rig.cluster.requests) == 1)
        await freeze(rig, "decode")
        await until(lambda: held(rig) == 1)
        await asyncio.sleep(2.0)
        assert held(rig) == 1
        thaw(rig, "decode")
        assert await task == undisturbed(generation)


async def test_a_pool_of_which_nobody_may_come_back_is_down_at_once() -> None:
    """It is empty, and nobody is on the way."""
    async with running_router(FakeCluster(), queue_s=QUEUE_S) as rig:
        rig.cluster.remove("decode-0")
        rig.router.pools_changed({})
        began_s = time.monotonic()
        with pytest.raises(ApiError, match="no decode replica is available"):
            await rig.tokens(generation_of(max_tokens=3, timeout_s=600.0))
        assert time.monotonic() - began_s < 0.1
