"""How long a request waits for a replica in all: what it waits counts on over its attempts, whatever befalls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.api_error import ApiError
from tests.cluster.fake_model import Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

QUEUE_S, COLD_START_S, TAIL_S = 30.0, 100.0, 2.0
LIMITS: dict[str, Any] = {
    "queue_s": QUEUE_S,
    "cold_start_s": COLD_START_S,
    "tail_s": TAIL_S,
    "max_retries": 2,
    "settle_s": 10_000.0,
}
NEVER_S = 10_000.0
EVERY_S = 20.0  # a replica dies: before anybody there has waited as long as he may


async def error_of(rig: Rig, **values: Any) -> tuple[ApiError, float]:
    """What a request's client is told, and after how long."""
    began_s = time.monotonic()
    with pytest.raises(ApiError) as caught:
        await rig.tokens(generation_of(timeout_s=600.0, **values))
    return caught.value, time.monotonic() - began_s


async def dying(rig: Rig, every_s: float, replace: Callable[[], None]) -> None:
    """One decode replica after the other, for ever."""
    while True:
        await asyncio.sleep(every_s)
        for name in list(rig.cluster.decode.members):
            rig.cluster.kill(name)
        replace()


async def ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def test_who_loses_his_place_again_and_again_waits_no_longer_for_room() -> None:
    """Each replica is full, and dies before its queue's time is up: its successor is there at once."""
    async with running_router(FakeCluster(), **LIMITS) as rig:
        rig.cluster.script = lambda _: Script(admit_s=NEVER_S)

        def replace() -> None:
            rig.cluster.decode.replace_dead()
            rig.router.pools_changed(rig.cluster.decode.replicas())

        storm = asyncio.create_task(dying(rig, EVERY_S, replace))
        error, waited_s = await error_of(rig)
        await ended(storm)
        assert (error.status, error.code) == (429, "queue_timeout")
        assert QUEUE_S - 0.1 <= waited_s <= QUEUE_S + TAIL_S
        assert len(rig.cluster.struck) == 0
        assert len(rig.cluster.of("generate")) == 2, "it has lost its place once"


async def test_who_waits_for_one_replacement_after_the_other_waits_no_longer_than_for_one() -> None:
    """Each of them dies as soon as it is there, with all that waited for it."""
    async with running_router(FakeCluster(), **LIMITS) as rig:
        rig.router.orders.expect({"decode": 60.0})
        rig.router.orders.wanted({"decode": 1})
        rig.cluster.script = lambda _: Script(admit_s=NEVER_S)

        def leave_the_pool() -> None:
            rig.cluster.decode.members.clear()
            rig.router.pools_changed({})

        async def come_and_go() -> None:
            while True:
                leave_the_pool()
                await asyncio.sleep(60.0)
                replica = rig.cluster.decode.join(f"decode-{time.monotonic()}")
                rig.router.pools_changed(rig.cluster.decode.replicas())
                await asyncio.sleep(5.0)
                rig.cluster.kill(replica.replica_id)
                await asyncio.sleep(0.1)

        rig.cluster.kill("decode-0")
        storm = asyncio.create_task(come_and_go())
        await until(lambda: rig.router.orders.coming("decode").num == 1)
        error, waited_s = await error_of(rig)
        await ended(storm)
        assert (error.status, error.code) == (503, "unavailable")
        assert COLD_START_S - 0.1 <= waited_s <= COLD_START_S + QUEUE_S


async def test_only_what_it_waits_counts_and_not_what_is_done_for_it() -> None:
    """Its prompt takes longer than anybody waits for room, and is lost; then it has all its time to wait for room."""
    async with running_router(FakeCluster(num_prefill=2), handoff_s=600.0, **LIMITS) as rig:
        lost = Script(Fault(Phase.PREFILL, "dead"), prefill_s=10 * QUEUE_S)
        rig.cluster.script = lambda _: Script(admit_s=QUEUE_S - 1.0) if rig.cluster.struck else lost
        generation = generation_of(timeout_s=600.0)
        began_s = time.monotonic()
        assert await rig.tokens(generation) == undisturbed(generation)
        assert time.monotonic() - began_s > 11 * QUEUE_S - 2.0
        assert (len(rig.cluster.struck), len(rig.cluster.requests)) == (1, 2)


async def test_who_has_waited_as_long_as_he_may_is_admitted_where_there_is_room() -> None:
    """It takes a moment, however little of its time is left."""
    async with running_router(FakeCluster(num_decode=2), handoff_s=600.0, **LIMITS) as rig:
        first = Script(Fault(Phase.ADMITTED, "dead"), admit_s=QUEUE_S - 0.1)
        rig.cluster.play(first, Script(admit_s=TAIL_S - 0.1))
        generation = generation_of(timeout_s=600.0)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 1


async def test_who_has_begun_waits_until_its_own_deadline() -> None:
    """An error would break what its client has."""
    async with running_router(FakeCluster(num_decode=2), **LIMITS) as rig:
        first = Script(Fault(Phase.DECODE, "dead", steps=2), admit_s=QUEUE_S - 1.0)
        rig.cluster.play(first, Script(admit_s=5 * QUEUE_S))
        generation = generation_of(timeout_s=600.0)
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.struck) == 1
