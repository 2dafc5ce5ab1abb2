"""A pool that autoscaling has emptied: requests wait for its first replica and are then answered as ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.api_error import ApiError
from tests.cluster.fake_model import Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

BOTH = ("decode", "prefill")


def emptied(cluster: FakeCluster, *pools: str) -> dict[str, dict[str, Any]]:
    """Takes all replicas away; returns them by pool."""
    taken = {}
    for name in pools:
        pool = getattr(cluster, name)
        taken[name], pool.members = pool.members, {}
    return taken


def started(rig: Rig, name: str, members: dict[str, Any]) -> None:
    """They are there, and Serve tells so."""
    pool = getattr(rig.cluster, name)
    pool.members = members
    if name == "decode":
        rig.router.pools_changed(pool.replicas())
    else:
        rig.router.prefill_changed()


@pytest.mark.parametrize("pools", [("decode",), ("prefill",), BOTH])
async def test_requests_wait_and_are_served(pools: tuple[str, ...]) -> None:
    cluster = FakeCluster()
    async with running_router(cluster, may_be_empty=BOTH) as rig:
        taken = emptied(cluster, *pools)
        generations = [generation_of(max_tokens=5) for _ in range(3)]
        tasks = [rig.start(generation) for generation in generations]
        await until(lambda: rig.router.demand.report().num_held == 3)
        demand = rig.router.demand.report()
        assert demand.num_open == 3
        assert (
            demand.waiting_prompt_tokens == demand.arrived_prompt_tokens == sum(s.spec.prompt_len for s in generations)
        )
        assert demand.waiting_blocks > 0
        assert cluster.calls == []
        for name in pools:
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in tasks)
            started(rig, name, taken[name])
        for generation, task in zip(generations, tasks, strict=True):
            assert await task == undisturbed(generation)
        demand = rig.router.demand.report()
        assert (demand.num_open, demand.num_held, demand.waiting_prompt_tokens, demand.waiting_blocks) == (0, 0, 0, 0)
        assert demand.arrived_prompt_tokens == sum(generation.spec.prompt_len for generation in generations)


async def test_nobody_comes_in_time() -> None:
    cluster = FakeCluster()
    async with running_router(cluster, may_be_empty=BOTH, cold_start_s=0.05) as rig:
        emptied(cluster, "decode")
        with pytest.raises(ApiError, match="no decode replica has started") as caught:
            await rig.tokens(generation_of(max_tokens=5))
        assert (caught.value.status, caught.value.code) == (503, "unavailable")
        assert caught.value.headers() == {"Retry-After": "10"}
        assert rig.count("splitserve_request_rejections", reason="no_capacity") == 1


async def test_when_to_come_back_is_when_a_replica_is_expected() -> None:
    cluster = FakeCluster()
    async with running_router(cluster, may_be_empty=BOTH, max_queued=1) as rig:
        taken = emptied(cluster, "decode")
        rig.router.pools_changed({})
        rig.router.orders.expect({"decode": 60.0})
        rig.router.orders.wanted({"decode": 1})
        task = rig.start(generation_of(max_tokens=3))
        await until(lambda: rig.router.demand.report().num_held == 1)
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of(max_tokens=3))
        assert 50 <= int(caught.value.headers()["Retry-After"]) <= 60
        started(rig, "decode", taken["decode"])
        assert await task == undisturbed(generation_of(max_tokens=3))


async def test_no_more_wait_than_may() -> None:
    cluster = FakeCluster()
    async with running_router(cluster, may_be_empty=BOTH, max_queued=2) as rig:
        taken = emptied(cluster, "decode")
        generations = [generation_of(max_tokens=3) for _ in range(2)]
        tasks = [rig.start(generation) for generation in generations]
        await until(lambda: rig.router.demand.report().num_held == 2)
        with pytest.raises(ApiError, match="wait for the first decode replica") as caught:
            await rig.tokens(generation_of(max_tokens=3))
        assert caught.value.status == 429
        started(rig, "decode", taken["decode"])
        assert [await task for task in tasks] == [undisturbed(generation) for generation in generations]


async def test_a_client_that_goes_is_held_no_longer() -> None:
    cluster = FakeCluster()
    async with running_router(cluster, may_be_empty=BOTH) as rig:
        emptied(cluster, "prefill")
        task = rig.start(generation_of(max_tokens=3))
        await until(lambda: rig.router.demand.report().num_held == 1)
        task.cancel()
        await asyncio.wait({task})
        demand = rig.router.demand.report()
        assert (demand.num_open, demand.num_held, demand.waiting_prompt_tokens, demand.waiting_blocks) == (0, 0, 0, 0)


@pytest.mark.parametrize("how", ["may not be empty", "falls back", "short"])
async def test_nobody_waits_for_a_pool_that_is_not_needed_or_never_starts(how: str) -> None:
    cluster = FakeCluster()
    pools = ("decode",) if how == "may not be empty" else BOTH
    local = 10_000 if how == "short" else 0
    async with running_router(
        cluster, may_be_empty=pools, fallback=how == "falls back", local_prefill_max_tokens=local
    ) as rig:
        emptied(cluster, "prefill")
        generation = generation_of(max_tokens=3)
        if how == "may not be empty":
            with pytest.raises(ApiError, match="no prefill replica is available"):
                await rig.tokens(generation)
        else:
            assert await rig.tokens(generation) == undisturbed(generation)
        report = rig.router.demand.report()
        assert report.num_held == 0
        # Whoever falls back is demand for the pool all the same: it starts for those who come after.
        assert report.arrived_prompt_tokens == (0 if how == "short" else generation.spec.prompt_len)


async def test_streams_that_lose_the_last_replica_are_not_refused_for_want_of_places() -> None:
    """Neither for newcomers that wait already nor for each other: they were let in when they came."""
    cluster = FakeCluster()
    async with running_router(cluster, max_queued=1, may_be_empty=("decode",), recovery_s=5.0) as rig:
        cluster.script = lambda _: Script(token_s=0.01)
        generations = [generation_of(i, max_tokens=30) for i in range(3)]
        tasks = [rig.start(generation) for generation in generations]
        await until(lambda: all(generation.binding.is_final for generation in generations))
        cluster.kill("decode-0")
        emptied(cluster, "decode")
        rig.router.pools_changed({})
        newcomer, refused = rig.start(generation_of(6)), rig.start(generation_of(7))
        await until(lambda: rig.router.demand.report().num_held == 4)
        cluster.decode.join("decode-1")
        rig.router.pools_changed(cluster.decode.replicas())
        for generation, task in zip(generations, tasks, strict=True):
            assert await task == undisturbed(generation)
        assert await newcomer == undisturbed(generation_of(6))
        with pytest.raises(ApiError, match="the most allowed"):
            await refused


# -- pools that have lost all they had -------------------------------------------------------------


def lose_all(rig: Rig, name: str, start_s: float = 60.0, *, is_known: bool = True) -> None:
    """Its only replica dies, and so many seconds are what a start takes. is_known: Serve has noticed."""
    rig.router.orders.expect(dict.fromkeys(BOTH, start_s))
    rig.router.orders.wanted(dict.fromkeys(BOTH, 1))
    rig.cluster.kill(f"{name}-0")
    if is_known:
        started(rig, name, {})


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", BOTH)
async def test_new_requests_wait_for_the_replacement_of_all_that_died(name: str, is_known: bool) -> None:
    """Serve's word of it may come later than a request that finds out."""
    cluster = FakeCluster()
    async with running_router(cluster, max_retries=1) as rig:
        lose_all(rig, name, is_known=is_known)
        generations = [generation_of(i, max_tokens=3) for i in range(3)]
        tasks = [rig.start(generation) for generation in generations]
        await until(lambda: rig.router.demand.report().num_held == 3)
        assert rig.router.orders.coming(name).num == 1
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        pool = getattr(cluster, name)
        started(rig, name, {"again": pool.join("again")})
        assert [await task for task in tasks] == [undisturbed(generation) for generation in generations]
        assert rig.count("splitserve_request_rejections") == 0


async def test_one_that_dies_idle_is_not_chosen_and_is_being_replaced() -> None:
    """No call finds out: Ray tells."""
    async with running_router(FakeCluster(num_prefill=2), max_retries=0) as rig:
        lose_all(rig, "prefill", is_known=False)
        rig.router.orders.wanted({"prefill": 2})
        assert rig.router.orders.coming("prefill").num == 0
        rig.cluster.prefill.tell_of_death("prefill-0")
        assert rig.router.orders.coming("prefill").num == 1
        for place in range(4):
            assert await rig.tokens(generation_of(place)) == undisturbed(generation_of(place))
        assert {call.replica_id for call in rig.cluster.of("prefill")} == {"prefill-1"}


async def test_no_more_wait_for_a_replacement_than_may() -> None:
    async with running_router(FakeCluster(), max_queued=2) as rig:
        lose_all(rig, "decode", 40.0)
        tasks = [rig.start(generation_of(max_tokens=3)) for _ in range(2)]
        await until(lambda: rig.router.demand.report().num_held == 2)
        with pytest.raises(ApiError, match="wait for the first decode replica") as caught:
            await rig.tokens(generation_of(max_tokens=3))
        assert caught.value.status == 429
        assert 30 <= int(caught.value.headers()["Retry-After"]) <= 40
        started(rig, "decode", {"again": rig.cluster.decode.join("again")})
        for task in tasks:
            assert await task == undisturbed(generation_of(max_tokens=3))


async def test_a_replacement_that_does_not_come_is_waited_for_twice_as_long_as_a_start_takes() -> None:
    async with running_router(FakeCluster(), cold_start_s=600.0) as rig:
        lose_all(rig, "decode", 0.3)
        with pytest.raises(ApiError, match="no decode replica is available") as caught:
            await asyncio.wait_for(rig.tokens(generation_of(max_tokens=3)), 20.0)
        assert (caught.value.status, caught.value.code) == (503, "unavailable")
        assert rig.router.demand.report().num_held == 0


async def test_a_replacement_is_waited_for_no_longer_than_a_request_may() -> None:
    async with running_router(FakeCluster(), cold_start_s=0.1) as rig:
        lose_all(rig, "decode", 70.0)
        with pytest.raises(ApiError, match="within the time that a request may wait") as caught:
            await asyncio.wait_for(rig.tokens(generation_of(max_tokens=3)), 20.0)
        assert caught.value.status == 503
        assert 60 <= int(caught.value.headers()["Retry-After"]) <= 70
