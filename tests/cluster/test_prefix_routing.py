"""The router in front of replicas with prefix caches: where prompts go, what is counted, and what replicas tell it."""

from __future__ import annotations

import pytest

from cluster.routing.generation import Generation
from tests.cluster.fake_model import MODEL, Fault, Phase, Script, generation_of
from tests.cluster.fake_pools import BLOCK_SIZE, FakeCluster
from tests.cluster.fake_prefix_cache import FakePrefixCache
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

PIECE = 16 * BLOCK_SIZE
# Queues and reads that are measured: what is cached then counts in seconds.
LOAD = {"prefill_tokens_per_s": 1e4}


def cluster_of(num_decode: int = 1, num_prefill: int = 3) -> FakeCluster:
    cluster = FakeCluster(num_decode, num_prefill, has_prefix_cache=True)
    for pool in cluster.pools:
        for replica in pool.members.values():
            replica.more_load = LOAD
    return cluster


def prompt(first: int, num_pieces: int = 3, rest: int = 5) -> Generation:
    """Its pieces are those of all others with the same first number."""
    return generation_of(*(first + index for index in range(num_pieces * PIECE)), *range(rest), max_tokens=3)


def cache_of(rig: Rig, name: str) -> FakePrefixCache:
    (cache,) = (pool.members[name].cache for pool in rig.cluster.pools if name in pool.members)
    assert cache is not None
    return cache


def prefilled_at(rig: Rig) -> list[str]:
    return [call.replica_id for call in rig.cluster.of("prefill")]


def believed(rig: Rig, generation: Generation) -> dict[str, int]:
    return dict(rig.router._forecasts.of(generation.spec).cached())


async def test_prompts_go_where_their_beginning_is() -> None:
    async with running_router(cluster_of(), local_by_cost=False) as rig:
        for first in (0, 5_000, 10_000, 0, 10_000, 5_000, 0):
            await rig.tokens(prompt(first))
        where = prefilled_at(rig)
        assert where[3] == where[6] == where[0]
        assert where[4] == where[2]
        assert where[5] == where[1]
        found = [number for name in {*where} for number in cache_of(rig, name).num_found]
        assert sorted(found) == [0] * 3 + [3 * PIECE + 4] * 4
        assert rig.count("splitserve_router_prefix_tokens", of_pool="prefill", what="predicted") == 4 * 3 * PIECE
        assert rig.count("splitserve_router_prefix_tokens", of_pool="prefill", what="found") == 4 * (3 * PIECE + 4)


async def test_what_is_expected_to_be_cached_counts_in_no_queue() -> None:
    async with running_router(cluster_of(num_prefill=1), local_by_cost=False) as rig:
        await rig.tokens(prompt(0))
        rig.cluster.script = lambda _: Script(prefill_s=0.2)
        view, calls = rig.router._view, [rig.start(prompt(first)) for first in (0, 5_000)]
        await until(lambda: len(rig.cluster.of("prefill")) == 3)
        assert view.sent_prompt_tokens == 5 + (3 * PIECE + 5), "the rest of the one, all of the other"
        for call in calls:
            await call


async def test_a_wrong_prediction_is_corrected_by_the_reply() -> None:
    async with running_router(cluster_of(num_prefill=1), local_by_cost=False) as rig:
        for first in (0, 5_000, 10_000):
            await rig.tokens(prompt(first))
        cache_of(rig, "prefill-0").evict_all()
        assert believed(rig, prompt(5_000))["prefill-0"] == 3 * PIECE
        await rig.tokens(prompt(5_000))
        assert "prefill-0" not in believed(rig, prompt(0)), "it was used before what is gone"
        assert 0 < believed(rig, prompt(5_000))["prefill-0"] < 3 * PIECE, "computed again; with less credit"
        assert rig.count("splitserve_router_prefix_tokens", of_pool="prefill", what="found") == 0


@pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.PREFILL])
async def test_what_an_attempt_that_failed_has_sent_is_not_believed(phase: Phase) -> None:
    async with running_router(cluster_of(num_decode=2), local_by_cost=False, max_retries=1) as rig:
        rig.cluster.fail(Fault(phase, "raise"))
        await rig.tokens(prompt(0))
        assert len(rig.cluster.struck) == 1
        await until(lambda: len(believed(rig, prompt(0))) == 2)
        first, second = (call.replica_id for call in rig.cluster.of("generate"))
        assert set(believed(rig, prompt(0))) == {second, prefilled_at(rig)[-1]}
        assert first != second


async def test_several_routers_learn_from_pulses_what_one_has_sent() -> None:
    cluster = cluster_of()
    async with running_router(cluster, local_by_cost=False, frozen_after_s=0.8) as rig:
        # Another router's prompts, as replicas see them.
        cache_of(rig, "prefill-2").take(prompt(0).spec)
        await until(lambda: believed(rig, prompt(0)) == {"prefill-2": 3 * PIECE})
        await rig.tokens(prompt(0))
        assert prefilled_at(rig) == ["prefill-2"]
        # It starts again: nothing is there.
        fresh = FakePrefixCache(MODEL, 10_000, BLOCK_SIZE, "e9")
        cluster.pools[1].members["prefill-2"].cache = fresh
        await until(lambda: "prefill-2" not in believed(rig, prompt(0)))


async def test_another_tenants_prompt_is_another() -> None:
    async with running_router(cluster_of(num_prefill=1), local_by_cost=False) as rig:
        generation = prompt(0)
        await rig.tokens(generation)
        assert believed(rig, generation)
        object.__setattr__(generation.spec, "cache_salt", b"tenant-2........")
        assert believed(rig, generation) == {}
        object.__setattr__(generation.spec, "cache_salt", b"")
        object.__setattr__(generation.spec, "use_cache", False)
        assert believed(rig, generation) == {}


async def test_without_prefix_caches_nothing_is_hashed_or_asked() -> None:
    cluster = FakeCluster()
    async with running_router(cluster, local_by_cost=False, frozen_after_s=0.4) as rig:
        asked: list[object] = []
        pulse = cluster.pools[1]._pulse  # type: ignore[attr-defined]

        async def seen(replica: object, keys_from: object) -> object:
            asked.append(keys_from)
            return await pulse(replica, keys_from)

        cluster.pools[1]._pulse = seen  # type: ignore[attr-defined]
        await rig.tokens(prompt(0))
        assert rig.router._forecasts.index is None
        await until(lambda: len(asked) > 1)
        assert set(asked) == {None}


async def test_a_mostly_cached_prompt_is_computed_by_decode() -> None:
    """What is left of it is up to local_prefill_max_tokens."""
    async with running_router(cluster_of(), local_by_cost=False, local_prefill_max_tokens=16) as rig:
        await rig.tokens(prompt(0))
        assert len(prefilled_at(rig)) == 1
        await until(lambda: "decode-0" in believed(rig, prompt(0)))
        await rig.tokens(prompt(0))
        assert len(prefilled_at(rig)) == 1
        assert rig.count("splitserve_router_decisions", result="local") == 1
