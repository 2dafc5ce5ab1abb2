"""Running requests move to another decode replica: each token comes once, nothing stays behind, and what goes wrong
costs the move or is replayed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cluster.routing.attempt import Attempt
from cluster.routing.generation import Generation
from cluster.routing.moves import LEAVING
from replicas.messages import CallStatus, GenerateCall
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import Rig, running_router, until

pytestmark = pytest.mark.usefixtures("skipped_waits")

SLOW = Script(token_s=0.005)
Running = list[tuple[Generation, asyncio.Task[Any]]]


def start_all(rig: Rig, num: int, max_tokens: int = 30) -> Running:
    generations = [generation_of(i, i + 1, seed=i, n=1 + i % 3, stop=(3,), max_tokens=max_tokens) for i in range(num)]
    return [(generation, rig.start(generation)) for generation in generations]


async def check_all(rig: Rig, running: Running) -> None:
    for generation, task in running:
        assert await task == undisturbed(generation)
    await rig.settle()


def movable(rig: Rig, name: str = "") -> list[Attempt]:
    here = [one for at in rig.router._moves._running.values() for one in at if one.may_move]
    return [one for one in here if name in ("", one.route.decode_id)]


def outcomes(rig: Rig) -> dict[str, float]:
    return {one: rig.count("splitserve_migrations", outcome=one) for one in ("moved", "refused", "lost")}


def says_it_leaves(rig: Rig, name: str) -> None:
    replica = rig.cluster.decode.members[name]
    replica.is_leaving, replica.more_load = True, {"is_leaving": True}


def open_at(rig: Rig, name: str) -> int:
    return sum(call.replica_id == name and call.end is None for call in rig.cluster.of("generate"))


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_all_that_a_leaving_replica_runs_goes_on_elsewhere(num_prefill: int) -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=num_prefill), max_retries=0) as rig:
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 12, max_tokens=200)
        await until(lambda: bool(movable(rig, "decode-0")))
        says_it_leaves(rig, "decode-0")
        await until(lambda: not open_at(rig, "decode-0"))
        assert not any(task.done() for _, task in running if len(undisturbed(_)[0]) > 150)
        rig.cluster.remove("decode-0")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await check_all(rig, running)
        assert outcomes(rig)["moved"] > 2
        assert outcomes(rig)["lost"] == rig.count("splitserve_retries") == 0
        assert rig.count("splitserve_migrated_tokens") > 2


async def test_replicas_that_leave_one_after_the_other_pass_on_what_they_were_passed() -> None:
    """The second says so while what comes from the first is on its way to it."""
    async with running_router(FakeCluster(num_decode=2, num_prefill=1), max_retries=0) as rig:
        rig.cluster.script = lambda _: Script(token_s=0.005, transfer_s=0.02)
        running = start_all(rig, 6, max_tokens=200)
        await until(lambda: bool(movable(rig, "decode-0")))
        says_it_leaves(rig, "decode-0")
        await until(lambda: len(rig.cluster.of("migrate")) > 0)
        rig.cluster.decode.join("decode-2")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        says_it_leaves(rig, "decode-1")
        await until(lambda: not open_at(rig, "decode-0") and not open_at(rig, "decode-1"))
        assert open_at(rig, "decode-2")
        await check_all(rig, running)
        assert not outcomes(rig)["lost"]


async def test_who_finds_no_room_goes_on_until_there_is_some() -> None:
    async with running_router(FakeCluster(num_decode=1, num_prefill=1), max_retries=0) as rig:
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 3, max_tokens=300)
        await until(lambda: bool(movable(rig)))
        says_it_leaves(rig, "decode-0")
        await asyncio.sleep(0.05)
        assert not rig.cluster.of("migrate")
        rig.cluster.decode.join("decode-1").fingerprint = "another model"
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await asyncio.sleep(0.05)
        assert not rig.cluster.of("migrate"), "KV never goes from one model to another"
        rig.cluster.decode.join("decode-2")
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await until(lambda: not open_at(rig, "decode-0"))
        await check_all(rig, running)
        assert outcomes(rig)["moved"] >= 1


async def test_who_runs_short_of_memory_gives_its_youngest_where_there_is_room() -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=1), max_retries=0) as rig:
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 8, max_tokens=150)
        await until(lambda: len(movable(rig, "decode-0")) > 1)
        youngest = movable(rig, "decode-0")[-1].request_id
        rig.cluster.decode.members["decode-0"].more_load = {"missing_blocks": 2}
        await until(lambda: bool(rig.cluster.of("migrate")))
        assert rig.cluster.of("migrate")[0].arguments[0].request_id == youngest
        rig.cluster.decode.members["decode-0"].more_load = {}
        await check_all(rig, running)
        assert rig.count("splitserve_migrations", cause="memory", outcome="moved") >= 1


async def test_nobody_moves_where_it_is_switched_off() -> None:
    cluster = FakeCluster(num_decode=2, num_prefill=1)
    async with running_router(cluster, max_retries=0, migrates=False) as rig:
        rig.cluster.script = lambda _: SLOW
        running = start_all(rig, 6)
        await until(lambda: bool(movable(rig, "decode-0")))
        says_it_leaves(rig, "decode-0")
        rig.cluster.decode.members["decode-1"].more_load = {"missing_blocks": 2}
        await check_all(rig, running)
        assert not rig.cluster.of("migrate")


@pytest.mark.parametrize(
    ("of_old", "of_new", "outcome"),
    [
        (Fault(Phase.MOVE, CallStatus.REJECTED), None, "refused"),
        (Fault(Phase.MOVE, "raise"), None, None),
        (Fault(Phase.MOVE, "dead"), None, "lost"),
        (None, Fault(Phase.QUEUE, CallStatus.REJECTED), "refused"),
        (None, Fault(Phase.QUEUE, "dead"), "refused"),
        (None, Fault(Phase.ADMITTED, CallStatus.KV_LOST), None),
        (None, Fault(Phase.TRANSFER, CallStatus.KV_LOST), "lost"),
        (None, Fault(Phase.TRANSFER, "dead"), "lost"),
        (None, Fault(Phase.TRANSFER, "raise"), "lost"),
        (None, Fault(Phase.DECODE, "dead", steps=1), "moved"),
        (None, Fault(Phase.REPLY, "raise"), "moved"),
    ],
)
async def test_what_goes_wrong_costs_the_move_or_is_replayed(
    of_old: Fault | None, of_new: Fault | None, outcome: str | None
) -> None:
    """Each time of one move of one of some streams. The others must not notice."""

    def script(call: GenerateCall) -> Script:
        return Script(of_new if call.num_generated else of_old, token_s=0.003)

    async with running_router(FakeCluster(num_decode=3, num_prefill=1), max_retries=2) as rig:
        rig.cluster.script = script
        running = start_all(rig, 4, max_tokens=60)
        await until(lambda: bool(movable(rig)))
        assert rig.router._moves.start(movable(rig)[0], LEAVING)
        await until(lambda: bool(rig.cluster.struck))
        rig.cluster.script = lambda _: SLOW
        rig.cluster.decode.replace_dead()
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await check_all(rig, running)
        if outcome is not None:
            assert outcomes(rig)[outcome] == 1


async def test_one_that_freezes_before_the_kv_that_it_promised_has_gone_is_given_up_as_any_other() -> None:
    """It has passed the stream on, so that no call of it is open there. Nobody waits as long as a handoff may take."""

    def script(call: GenerateCall) -> Script:
        return Script(Fault(Phase.ADMITTED, "hang") if call.num_generated else None, token_s=0.02)

    limits = {"max_retries": 1, "frozen_after_s": 0.4, "handoff_s": 600.0}
    async with running_router(FakeCluster(num_decode=3, num_prefill=1), **limits) as rig:
        rig.cluster.script = script
        ((generation, task),) = start_all(rig, 1, max_tokens=60)
        await until(lambda: bool(movable(rig)))
        old = movable(rig)[0].route.decode_id
        assert rig.router._moves.start(movable(rig)[0], LEAVING)
        await until(lambda: bool(rig.cluster.struck) and not open_at(rig, old))
        rig.cluster.decode.members[old].thaw.clear()
        rig.cluster.script = lambda _: PLAIN
        assert await asyncio.wait_for(task, 10.0) == undisturbed(generation)
        assert outcomes(rig)["lost"] == 1
        rig.cluster.decode.members[old].thaw.set()


async def test_a_client_that_goes_leaves_nothing_behind_wherever_the_move_is() -> None:
    async with running_router(FakeCluster(num_decode=2, num_prefill=1)) as rig:
        rig.cluster.script = lambda call: Script(
            token_s=0.002, admit_s=0.004 * bool(call.num_generated), transfer_s=0.004
        )
        for wait in range(0, 16, 2):
            ((_, task),) = start_all(rig, 1, max_tokens=100)
            await until(lambda: bool(movable(rig)))
            assert rig.router._moves.start(movable(rig)[0], LEAVING)
            await asyncio.sleep(wait / 1000)
            task.cancel()
            await asyncio.wait({task})
            await rig.settle()


_FAULTS = [
    Fault(Phase.MOVE, CallStatus.REJECTED),
    Fault(Phase.MOVE, "raise"),
    Fault(Phase.QUEUE, CallStatus.REJECTED),
    Fault(Phase.ADMITTED, CallStatus.KV_LOST),
    Fault(Phase.TRANSFER, CallStatus.KV_LOST),
    Fault(Phase.TRANSFER, "raise"),
    Fault(Phase.DECODE, CallStatus.EVICTED, steps=1),
]


@pytest.mark.parametrize("seed", range(6))
async def test_moves_and_faults_at_random(seed: int) -> None:
    rng = random.Random(seed)

    def script(call: GenerateCall) -> Script:
        fault = rng.choice(_FAULTS) if rng.random() < (0.4 if call.num_generated else 0.1) else None
        waits = [rng.choice([0.0, 0.001, 0.004]) for _ in range(4)]
        return Script(fault, admit_s=waits[0], transfer_s=waits[1], token_s=waits[2], reply_s=waits[3])

    async with running_router(FakeCluster(num_decode=3, num_prefill=1), max_retries=50) as rig:
        rig.cluster.script = script
        running = start_all(rig, 24, max_tokens=40)
        while not all(task.done() for _, task in running):
            await asyncio.sleep(0.001)
            if able := movable(rig):
                rig.router._moves.start(rng.choice(able), LEAVING)
        await check_all(rig, running)
        assert outcomes(rig)["moved"] > 5
        rig.cluster.script = lambda _: PLAIN
