"""A burst that orders replicas is served by them: it waits for them, and goes to them when they come."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from cluster.api_error import ApiError
from tests.cluster.fake_model import Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

# Five prompt tokens and eight more are four blocks: so many at once.
ROOM = 2
QUEUE_S = 0.1


def full_cluster(**values: Any) -> FakeCluster:
    """Its one decode replica has room for two; each takes longer than anybody waits for room."""
    cluster = FakeCluster(decode_blocks=4 * ROOM, **values)
    cluster.script = lambda _: Script(token_s=0.06)
    return cluster


def ordered(rig: Rig, num_decode: int, guess_s: float = 60.0) -> None:
    rig.router.orders.expect({"decode": guess_s, "prefill": guess_s})
    rig.router.orders.wanted({"decode": num_decode, "prefill": 1})


def joined(rig: Rig, *names: str) -> None:
    for name in names:
        rig.cluster.decode.join(name)
    rig.router.pools_changed(rig.cluster.decode.replicas())


async def served_by(rig: Rig) -> Counter[str]:
    await rig.settle()
    return Counter(call.replica_id for call in rig.cluster.of("generate") if call.end == "ok")


async def burst(rig: Rig, number: int) -> list[asyncio.Task[Any]]:
    """They come one after the other; all but two wait."""
    tasks = []
    for index in range(number):
        tasks.append(rig.start(generation_of(index + 1, 2, 3, 4, 5)))
        await asyncio.sleep(0.002)
    await until(lambda: rig.router.num_waiting == number - ROOM, lambda: rig.router.num_waiting)
    return tasks


def right(number: int) -> list[Any]:
    return [undisturbed(generation_of(index + 1, 2, 3, 4, 5)) for index in range(number)]


async def test_a_burst_waits_for_the_replicas_that_it_ordered_and_is_served_by_them() -> None:
    cluster = full_cluster()
    async with running_router(cluster, queue_s=QUEUE_S, settle_s=0.01) as rig:
        ordered(rig, 1)
        tasks = await burst(rig, 8)
        ordered(rig, 3)
        await asyncio.sleep(2 * QUEUE_S)  # longer than anybody would wait for room
        assert not any(task.done() for task in tasks)
        joined(rig, "decode-1", "decode-2")
        assert [await task for task in tasks] == right(8)
        served = await served_by(rig)
        assert set(served) == {"decode-0", "decode-1", "decode-2"}
        assert min(served["decode-1"], served["decode-2"]) >= ROOM
        assert rig.count("splitserve_queue_moves") >= 2 * ROOM
        assert rig.count("splitserve_request_rejections") == 0


async def test_only_as_many_go_there_as_it_has_room_for_and_those_who_came_first() -> None:
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=0.5)
    async with running_router(cluster, settle_s=0.01) as rig:
        ordered(rig, 2)
        tasks = await burst(rig, 7)
        await asyncio.sleep(0.02)
        joined(rig, "decode-1")
        await until(lambda: len([c for c in cluster.of("generate") if c.replica_id == "decode-1"]) == ROOM)
        await asyncio.sleep(0.2)
        at_new = [call.arguments[0].spec.prompt_ids[0] for call in cluster.calls if is_at(call, "decode-1")]
        assert at_new == [3, 4]  # 1 and 2 are running
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def is_at(call: Any, replica_id: str) -> bool:
    return bool(call.method == "generate" and call.replica_id == replica_id)


async def test_who_waits_goes_before_who_comes() -> None:
    """Where there is room that the next frame would tell of, and somebody comes before it."""
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=2.0)
    async with running_router(cluster, settle_s=0.05) as rig:
        tasks = await burst(rig, 3)
        replica = cluster.decode.join("decode-1")  # nobody is told that the pool has changed
        replica.used_blocks = 4  # room for one
        rig.router._view.heard_load("decode-1", replica.load)
        await asyncio.sleep(0.1)
        assert not any(is_at(call, "decode-1") for call in cluster.calls)
        tasks.append(rig.start(generation_of(9, 2, 3, 4, 5)))
        await until(lambda: any(is_at(call, "decode-1") for call in cluster.calls))
        await asyncio.sleep(0.01)
        at_new = [call.arguments[0].spec.prompt_ids[0] for call in cluster.calls if is_at(call, "decode-1")]
        assert at_new[0] == 3  # and behind it perhaps who came
        replica.used_blocks -= 4
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_without_an_order_who_waits_too_long_is_refused_as_ever() -> None:
    cluster = full_cluster()
    async with running_router(cluster, queue_s=QUEUE_S, settle_s=0.01) as rig:
        ordered(rig, 1)
        tasks = await burst(rig, 4)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:2] == right(2)
        assert [(error.status, error.code) for error in refusals(results[2:])] == [(429, "queue_timeout")] * 2
        assert rig.count("splitserve_request_rejections", reason="queue_timeout") == 2


def refusals(results: list[Any]) -> list[ApiError]:
    assert all(isinstance(result, ApiError) for result in results), results
    return results


async def test_a_start_that_hangs_is_an_honest_503_within_its_time() -> None:
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=0.5)
    async with running_router(cluster, queue_s=QUEUE_S, settle_s=0.01) as rig:
        ordered(rig, 1, guess_s=0.3)
        tasks = await burst(rig, 4)
        ordered(rig, 2, guess_s=0.3)
        results = await asyncio.gather(*tasks[2:], return_exceptions=True)
        assert [(error.status, error.code) for error in refusals(results)] == [(503, "unavailable")] * 2
        assert "1 have not started" in str(results[0])
        assert int(results[0].headers()["Retry-After"]) >= 1
        assert rig.count("splitserve_request_rejections", reason="no_capacity") == 2
        assert rig.count("splitserve_request_rejections", reason="queue_timeout") == 0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_what_is_waited_for_replicas_has_a_bound_whatever_is_guessed() -> None:
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=0.5)
    async with running_router(cluster, queue_s=QUEUE_S, cold_start_s=0.3) as rig:
        tasks = await burst(rig, 3)
        ordered(rig, 2, guess_s=1000.0)
        with pytest.raises(ApiError, match="have not started"):
            await tasks[2]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_an_order_that_is_withdrawn_is_waited_for_no_longer() -> None:
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=0.5)
    async with running_router(cluster, queue_s=QUEUE_S) as rig:
        ordered(rig, 2)
        tasks = await burst(rig, 3)
        await asyncio.sleep(2 * QUEUE_S)
        assert not tasks[2].done()
        ordered(rig, 1)
        with pytest.raises(ApiError) as caught:
            await tasks[2]
        assert (caught.value.status, caught.value.code) == (429, "queue_timeout")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_replica_that_comes_and_dies_at_once_loses_nobody() -> None:
    cluster = full_cluster()
    async with running_router(cluster, settle_s=0.01, retry_delay_s=0.001) as rig:
        ordered(rig, 2)
        tasks = await burst(rig, 6)
        await asyncio.sleep(0.02)
        joined(rig, "decode-1")
        await until(lambda: any(is_at(call, "decode-1") for call in cluster.calls))
        cluster.kill("decode-1")
        await asyncio.sleep(0.05)
        cluster.remove("decode-1")
        rig.router.pools_changed(cluster.decode.replicas())
        joined(rig, "decode-2")
        assert [await task for task in tasks] == right(6)
        assert (await served_by(rig))["decode-2"] > 0


async def test_an_old_replica_that_is_free_first_takes_who_waits_elsewhere() -> None:
    """Two old ones are full, and one of them is free long before the other."""
    cluster = FakeCluster(num_decode=2, decode_blocks=4 * ROOM)
    cluster.script = lambda call: Script(token_s=2.0 if call.spec.prompt_ids[0] % 2 else 0.05)
    async with running_router(cluster, queue_s=60.0, settle_s=0.01) as rig:
        signs = asyncio.create_task(rig.signs_of_life())
        tasks = []
        for index in range(4):
            tasks.append(rig.start(generation_of(index + 1, 2, 3, 4, 5)))
            await until(lambda: len(cluster.of("generate")) == len(tasks))
        slow = {c.replica_id for c in cluster.of("generate") if c.arguments[0].spec.prompt_ids[0] % 2}
        assert len(slow) == 1
        await asyncio.sleep(0.05)
        generations = [generation_of(10 + 2 * index, 2, 3, 4, 5) for index in range(4)]
        waiting = [rig.start(generation) for generation in generations]
        assert [await task for task in waiting] == [undisturbed(generation) for generation in generations]
        assert rig.count("splitserve_queue_moves") >= 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        signs.cancel()


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    """Also at the very moment when it is called elsewhere: the rig looks that nothing remains."""
    cluster = full_cluster()
    cluster.script = lambda _: Script(token_s=0.02)
    async with running_router(cluster, settle_s=0.01) as rig:
        ordered(rig, 2)
        tasks = await burst(rig, 8)
        await asyncio.sleep(0.02)
        cluster.decode.join("decode-1")
        for task in tasks[1::2]:
            task.cancel()
        rig.router.pools_changed(cluster.decode.replicas())  # before any of them has run
        for task in tasks[2::4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        expected = right(8)
        assert [results[0], results[4]] == [expected[0], expected[4]]
        assert all(isinstance(result, asyncio.CancelledError) for result in (*results[1::2], *results[2::4]))
        assert len(rig.router._waits.room) == 0


async def test_a_burst_during_a_rolling_update_waits_for_the_replacement() -> None:
    """A pool of fixed size: one of two leaves and another is on its way; nobody tells of scaling."""
    cluster = FakeCluster(num_decode=2, decode_blocks=4 * ROOM)
    cluster.script = lambda _: Script(token_s=0.06)
    async with running_router(cluster, queue_s=QUEUE_S, settle_s=0.01) as rig:
        ordered(rig, 2)
        cluster.remove("decode-0")
        rig.router.pools_changed(cluster.decode.replicas())
        tasks = await burst(rig, 5)
        await asyncio.sleep(2 * QUEUE_S)
        assert not any(task.done() for task in tasks)
        joined(rig, "decode-2")
        assert [await task for task in tasks] == right(5)
        assert (await served_by(rig))["decode-2"] >= 1


async def test_a_full_queue_is_refused_at_once_and_told_when_a_replica_is_expected() -> None:
    cluster = full_cluster()
    async with running_router(cluster, max_queued=2, settle_s=0.01) as rig:
        ordered(rig, 2)
        tasks = await burst(rig, 4)
        with pytest.raises(ApiError) as caught:
            await rig.tokens(generation_of(9, 2, 3, 4, 5))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert 50 <= int(caught.value.headers()["Retry-After"]) <= 60
        joined(rig, "decode-1")
        assert [await task for task in tasks] == right(4)


async def test_from_zero_the_first_one_gets_them_all_and_the_next_ones_their_part() -> None:
    cluster = full_cluster()
    async with running_router(cluster, queue_s=QUEUE_S, settle_s=0.01, may_be_empty=("decode",)) as rig:
        taken, cluster.decode.members = cluster.decode.members, {}
        rig.router.pools_changed({})
        ordered(rig, 3)
        tasks = [rig.start(generation_of(index + 1, 2, 3, 4, 5)) for index in range(6)]
        await until(lambda: rig.router.demand.report().num_held == 6)
        cluster.decode.members = taken
        rig.router.pools_changed(cluster.decode.replicas())
        await asyncio.sleep(2 * QUEUE_S)
        joined(rig, "decode-1", "decode-2")
        assert [await task for task in tasks] == right(6)
        assert set(await served_by(rig)) == {"decode-0", "decode-1", "decode-2"}


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_prompts_wait_for_prefill_replicas_that_were_ordered(is_ordered: bool) -> None:
    """Longer than handoff_timeout_s, and then their KV has time to move."""
    cluster = FakeCluster()
    cluster.script = lambda _: Script(prefill_s=0.4)
    async with running_router(cluster, handoff_s=0.1, max_retries=0, local_by_cost=False) as rig:
        rig.router.orders.expect({"decode": 60.0, "prefill": 60.0})
        rig.router.orders.wanted({"decode": 1, "prefill": 2 if is_ordered else 1})
        if is_ordered:
            assert await rig.tokens(generation_of()) == undisturbed(generation_of())
            assert [call.end for call in cluster.of("prefill")] == ["ok"]
        else:
            with pytest.raises(ApiError) as caught:
                await rig.tokens(generation_of())
            assert caught.value.status == 504


async def nine_prompts_and_a_new_replica(rig: Rig) -> list[asyncio.Task[Any]]:
    """One behind the other at the only prefill replica; then there is another one."""
    tasks: list[asyncio.Task[Any]] = []
    for index in range(9):
        tasks.append(rig.start(generation_of(index + 1, 2, 3, 4, 5)))
        await until(lambda: len(rig.cluster.of("prefill")) == len(tasks))
    assert rig.cluster.prefill is not None
    rig.cluster.prefill.join("prefill-1")
    await asyncio.sleep(0.15)
    rig.router.prefill_changed()
    return tasks


async def test_prompts_behind_many_go_to_a_new_prefill_replica() -> None:
    """The first of the queue stay; of the others every third goes there, and each is answered once."""
    cluster = FakeCluster()
    cluster.script = lambda _: Script(prefill_s=1.0)
    async with running_router(cluster, settle_s=0.01, local_by_cost=False) as rig:
        tasks = await nine_prompts_and_a_new_replica(rig)
        await until(lambda: any(call.replica_id == "prefill-1" for call in cluster.of("prefill")))
        await asyncio.sleep(0.2)
        at_new = [call for call in cluster.of("prefill") if call.replica_id == "prefill-1"]
        assert [call.arguments[0].spec.prompt_ids[0] for call in at_new] == [3, 6, 9]
        assert [await task for task in tasks] == right(9)
        assert rig.count("splitserve_queue_moves") >= 3


async def test_a_client_that_leaves_while_its_prompt_moves_leaves_nothing_behind() -> None:
    cluster = FakeCluster()
    cluster.script = lambda _: Script(prefill_s=0.3)
    async with running_router(cluster, settle_s=0.01, local_by_cost=False) as rig:
        tasks = await nine_prompts_and_a_new_replica(rig)
        for task in tasks[2::3]:  # before any of them has run
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        expected = right(9)
        for index, result in enumerate(results):
            assert isinstance(result, asyncio.CancelledError) if index % 3 == 2 else result == expected[index]
        assert len(rig.router._waits.prompts) == 0
