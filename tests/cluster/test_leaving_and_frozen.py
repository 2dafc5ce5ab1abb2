"""Replicas leave, refuse, freeze and come back while requests run: nothing is lost, cut or counted against them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.api_error import ApiError
from cluster.routing.generation import Generation
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.fake_replica import FakeReplica
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

SLOW = Script(token_s=0.02, prefill_s=0.05)
FROZEN_S = 0.4


def pair(**sizes: int) -> FakeCluster:
    return FakeCluster(**{"num_decode": 2, "num_prefill": 2, **sizes})


def start_all(rig: Rig, num: int, **values: Any) -> list[tuple[Generation, asyncio.Task[Any]]]:
    generations = [generation_of(i, i + 1, seed=i, **values) for i in range(num)]
    return [(generation, rig.start(generation)) for generation in generations]


async def check_all(running: list[tuple[Generation, asyncio.Task[Any]]]) -> None:
    for generation, task in running:
        assert await task == undisturbed(generation)


def lost(rig: Rig, reason: str) -> float:
    return rig.count("splitserve_replica_losses", reason=reason)


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_who_refuses_because_it_leaves_costs_no_retry_and_is_not_asked_again(name: str) -> None:
    """SIGTERM has reached it; Serve has told nobody yet."""
    async with running_router(pair(), max_retries=0) as rig:
        member(rig, name).is_leaving = True
        await check_all(start_all(rig, 6))
        refused = [call for call in rig.cluster.calls if call.replica_id == name and call.method in CALLS]
        # Those that were routed before the first refusal came; nobody after it.
        await check_all(start_all(rig, 6))
        assert [call for call in rig.cluster.calls if call.replica_id == name and call.method in CALLS] == refused
        assert lost(rig, "leaving") == 1


CALLS = ("generate", "prefill")


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_one_that_left_the_table_ends_what_it_had_begun(name: str) -> None:
    async with running_router(pair(), max_retries=0) as rig:
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 6)
        await until(lambda: any(c.replica_id == name and c.method in CALLS and not c.end for c in rig.cluster.calls))
        replica = rig.cluster.remove(name)
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await check_all(running)
        assert rig.count("splitserve_retries") == 0 or name.startswith("prefill")
        await rig.settle()
        assert not replica.used_blocks


async def test_one_that_leaves_before_it_admits_still_serves() -> None:
    """The request waits in its queue when it leaves: it is not sent elsewhere, and nothing is counted."""
    async with running_router(pair(num_decode=1), max_retries=0) as rig:
        rig.cluster.script = lambda _: Script(admit_s=0.1)
        running = start_all(rig, 3)
        await until(lambda: len(rig.cluster.of("generate")) == 3)
        rig.cluster.remove("decode-0")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await check_all(running)
        assert rig.count("splitserve_retries") == 0


async def test_replicas_come_and_go_under_load() -> None:
    """A rolling update of one pool after the other: each replica is replaced, one by one, while requests run."""
    async with running_router(pair(), max_retries=0) as rig:
        rig.cluster.script = lambda _: Script(token_s=0.002)
        running = start_all(rig, 40)
        gone: list[FakeReplica] = []
        for pool in rig.cluster.pools:
            for old in list(pool.members):
                await asyncio.sleep(0.01)
                pool.join(f"{old}-new")
                rig.router.pools_changed(rig.cluster.decode.replicas())
                gone.append(rig.cluster.remove(old))
                rig.router.pools_changed(rig.cluster.decode.replicas())
                running += [(s := generation_of(len(running), seed=len(running)), rig.start(s)) for _ in range(5)]
        await check_all(running)
        assert len(gone) == 4
        await rig.settle()
        assert not any(replica.used_blocks for replica in gone)


async def test_nothing_is_kept_of_replicas_that_have_left() -> None:
    """However many come and go. Some leave while they still work for us: they are forgotten with those after them."""
    async with running_router(pair(), max_retries=0) as rig, signs_of_life(rig):
        rig.cluster.script = lambda _: Script(token_s=0.002)
        running: list[tuple[Generation, asyncio.Task[Any]]] = []
        for generation in range(20):
            for pool in rig.cluster.pools:
                (old, *_) = pool.members
                pool.join(f"{pool.name}-of-{generation}")
                rig.router.pools_changed(rig.cluster.decode.replicas())
                running += start_all(rig, 3)
                await asyncio.sleep(0.005)
                rig.cluster.remove(old)
                rig.router.pools_changed(rig.cluster.decode.replicas())
                rig.router.prefill_changed()
        await check_all(running)
        view, intake = rig.router._view, rig.router._intake
        rig.router.pools_changed(rig.cluster.decode.replicas())
        present = {name for pool in rig.cluster.pools for name in pool.members}
        assert len(present) == 4
        for kept in (view._heard, view._candidates, view._agent_names, intake._admitted):
            assert set(kept) <= present
        assert len(intake.receiver._allowed.keys) == len(rig.cluster.decode.members)
        assert {replica_id for replica_id, _ in intake.receiver._streams} <= present


# -- frozen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_what_a_frozen_replica_had_goes_on_elsewhere_within_the_bound(name: str) -> None:
    async with running_router(pair(), max_retries=1, frozen_after_s=FROZEN_S) as rig, signs_of_life(rig):
        rig.cluster.script = lambda _: Script(token_s=0.03, prefill_s=0.1)
        running = start_all(rig, 6)
        await until(lambda: any(c.replica_id == name and c.method in CALLS and not c.end for c in rig.cluster.calls))
        replica = member(rig, name)
        replica.thaw.clear()
        froze_s = time.monotonic()
        await until(lambda: lost(rig, "frozen") == 1)
        assert time.monotonic() - froze_s < 4 * FROZEN_S
        rig.cluster.script = lambda _: Script()
        await check_all(running)
        num_calls = len([c for c in rig.cluster.calls if c.replica_id == name and c.method in CALLS])
        await check_all(start_all(rig, 4))
        assert len([c for c in rig.cluster.calls if c.replica_id == name and c.method in CALLS]) == num_calls
        replica.thaw.set()
        pool = next(pool for pool in rig.router.pools if name.startswith(pool.name))
        await until(lambda: not pool.lost)


async def test_one_that_freezes_between_its_answer_and_its_handoff_is_given_up_as_any_other() -> None:
    """No call is open there, and decode waits for KV: not for as long as a handoff may take."""
    cluster = pair(num_decode=1)
    async with running_router(cluster, max_retries=0, frozen_after_s=FROZEN_S, handoff_s=600.0) as rig:
        cluster.fail(Fault(Phase.ADMITTED, "hang"))
        ((generation, task),) = start_all(rig, 1)
        await until(lambda: [call.end for call in cluster.of("prefill")] == ["ok"])
        name = cluster.of("prefill")[0].replica_id
        member(rig, name).thaw.clear()
        assert await asyncio.wait_for(task, 20 * FROZEN_S) == undisturbed(generation)
        assert lost(rig, "frozen") == 1
        assert [call.replica_id == name for call in cluster.of("prefill")] == [True, False]
        member(rig, name).thaw.set()


async def test_one_that_works_on_behind_its_answer_is_not_given_up() -> None:
    """Its KV comes long after it has answered, and it says that it is well."""
    async with running_router(pair(num_decode=1), max_retries=0, frozen_after_s=FROZEN_S) as rig:
        rig.cluster.script = lambda _: Script(transfer_s=3 * FROZEN_S)
        await check_all(start_all(rig, 2))
        assert len(rig.cluster.of("prefill")) == 2
        assert lost(rig, "frozen") == 0


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_one_that_leaves_and_freezes_has_its_work_done_elsewhere(name: str) -> None:
    """It has said that it leaves, and is in the table still."""
    async with running_router(pair(), max_retries=1, frozen_after_s=FROZEN_S, migrates=False) as rig:
        rig.cluster.script = lambda _: Script(token_s=0.03, prefill_s=3.0)
        running = start_all(rig, 6)
        await until(lambda: any(c.replica_id == name and c.method in CALLS and not c.end for c in rig.cluster.calls))
        pool = next(pool for pool in rig.router.pools if name.startswith(pool.name))
        pool._says_it_leaves(name)
        member(rig, name).thaw.clear()
        rig.cluster.script = lambda _: Script()
        await asyncio.wait_for(check_all(running), 20 * FROZEN_S)
        assert (lost(rig, "leaving"), lost(rig, "frozen")) == (1, 1)
        member(rig, name).thaw.set()
        await asyncio.sleep(FROZEN_S)
        assert list(pool.lost) == [name]


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_process_that_answers_while_its_engine_stands_still_is_frozen(name: str) -> None:
    async with running_router(pair(), frozen_after_s=FROZEN_S) as rig:
        member(rig, name).stalled_s = 10.0
        await until(lambda: lost(rig, "frozen") == 1)
        pool = next(pool for pool in rig.router.pools if name.startswith(pool.name))
        assert list(pool.lost) == [name]
        member(rig, name).stalled_s = 0.0
        await until(lambda: not pool.lost)


async def test_a_stream_waits_for_the_only_decode_replica_to_come_back() -> None:
    async with running_router(pair(num_decode=1), frozen_after_s=FROZEN_S, recovery_s=5.0) as rig, signs_of_life(rig):
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 3)
        await until(lambda: any(frame.tokens for ring in member(rig, "decode-0").rings.values() for frame in ring))
        member(rig, "decode-0").thaw.clear()
        await until(lambda: lost(rig, "frozen") == 1)
        running += [(newcomer := generation_of(9), rig.start(newcomer))]
        await until(lambda: rig.router.demand.report().num_held == 1)
        member(rig, "decode-0").thaw.set()
        await check_all(running)


async def test_without_another_replica_a_stream_ends_with_an_error_and_not_by_its_deadline() -> None:
    limits = {"frozen_after_s": FROZEN_S, "recovery_s": 0.3}
    async with running_router(pair(num_decode=1), **limits) as rig, signs_of_life(rig):
        rig.cluster.script = lambda _: SLOW
        ((_, task),) = start_all(rig, 1, max_tokens=50)
        await until(lambda: any(frame.tokens for ring in member(rig, "decode-0").rings.values() for frame in ring))
        member(rig, "decode-0").thaw.clear()
        began_s = time.monotonic()
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.status == 503
        assert "no decode replica is available" in caught.value.message
        assert time.monotonic() - began_s < 4.0
        member(rig, "decode-0").thaw.set()


async def test_a_stream_of_a_dead_replica_goes_on_at_the_one_that_replaces_it() -> None:
    """The replacement comes long after all retries would have been spent."""
    async with running_router(pair(num_decode=1), max_retries=1, recovery_s=5.0) as rig:
        rig.cluster.play(Script(Fault(Phase.DECODE, "dead", steps=3)))
        ((generation, task),) = start_all(rig, 1)
        await until(lambda: lost(rig, "dead") == 1)
        await asyncio.sleep(0.3)
        rig.cluster.decode.replace_dead()
        rig.router.pools_changed(rig.cluster.decode.replicas())
        assert await task == undisturbed(generation)


async def lose_the_only_one(rig: Rig, start_s: float, **values: Any) -> tuple[Generation, asyncio.Task[Any]]:
    """A stream has begun at the only decode replica, which has died; another one is on its way, and takes so long."""
    rig.router.orders.expect({"decode": start_s})
    rig.router.orders.wanted({"decode": 1})
    rig.cluster.play(Script(Fault(Phase.DECODE, "dead", steps=3)))
    (running,) = start_all(rig, 1, **values)
    await until(lambda: lost(rig, "dead") == 1)
    rig.cluster.remove("decode-0")
    rig.router.pools_changed(rig.cluster.decode.replicas())
    assert rig.router.orders.coming("decode").num == 1
    return running


async def test_a_stream_waits_for_the_replacement_that_was_ordered_as_long_as_its_start_takes() -> None:
    """On a busy machine, or with a large model, a start takes longer than `lifecycle.recovery_timeout_s`."""
    async with running_router(pair(num_decode=1), max_retries=1, recovery_s=0.2) as rig:
        generation, task = await lose_the_only_one(rig, 60.0)
        await asyncio.sleep(0.8)
        assert not task.done()
        rig.cluster.decode.join("decode-1")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        assert await task == undisturbed(generation)


async def test_it_gives_up_on_a_replacement_that_does_not_come() -> None:
    """After twice as long as a start is known to take."""
    async with running_router(pair(num_decode=1), max_retries=1, recovery_s=0.1) as rig:
        _, task = await lose_the_only_one(rig, 0.2)
        with pytest.raises(ApiError, match="no decode replica is available"):
            await task


async def test_it_waits_for_a_replacement_no_longer_than_its_client_does() -> None:
    """However long a start may take."""
    async with running_router(pair(num_decode=1), max_retries=1, recovery_s=0.1) as rig:
        began_s = time.monotonic()
        _, task = await lose_the_only_one(rig, 600.0, timeout_s=1.0)
        await asyncio.sleep(0.4)
        assert not task.done()
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(task, 20.0)
        assert caught.value.status in (503, 504)
        assert time.monotonic() - began_s >= 0.9


async def test_the_dead_are_not_chosen_though_the_table_still_has_them() -> None:
    async with running_router(pair(), max_retries=1) as rig:
        rig.cluster.kill("decode-0")
        await check_all(start_all(rig, 8))
        assert lost(rig, "dead") == 1
        num_calls = len(rig.cluster.of("generate"))
        await check_all(start_all(rig, 4))
        assert {call.replica_id for call in rig.cluster.of("generate")[num_calls:]} == {"decode-1"}


# -- no false alarms -------------------------------------------------------------------------------


async def test_nobody_is_frozen_who_is_only_busy() -> None:
    """No frame for much longer than the bound, as in a long step: the process says that its engine works."""
    async with running_router(pair(), max_retries=0, frozen_after_s=FROZEN_S) as rig:
        rig.cluster.script = lambda _: Script(admit_s=0.3, prefill_s=1.0, transfer_s=0.8)
        await check_all(start_all(rig, 4))
        assert lost(rig, "frozen") == 0


def member(rig: Rig, name: str) -> FakeReplica:
    (replica,) = (pool.members[name] for pool in rig.cluster.pools if name in pool.members)
    return replica


@asynccontextmanager
async def signs_of_life(rig: Rig) -> AsyncIterator[None]:
    """Idle engines send frames meanwhile."""
    task = asyncio.create_task(rig.signs_of_life())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
