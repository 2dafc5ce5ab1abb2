"""A move is held at each of its phases; then it goes on, or one of its two engines dies, or its KV is spoilt: texts are
those of transformers, each token comes once, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.routing.attempt import Attempt
from cluster.routing.generation import Generation
from cluster.routing.moves import LEAVING
from cluster.routing.router import Router
from cluster.routing.router_limits import MigrationLimits
from replicas.settings import FaultSettings
from tests.engines.grammar_reference import GrammarReference
from tests.engines.held_streams import held_streams
from tests.engines.local_system import Generated, collect, touch
from tests.engines.moving_system import MovingSystem, movable
from tests.engines.test_moving import check, mixed
from tests.engines.tiny_model import tiny_settings

OLD, READER, OTHER = "decode-0", "decode-1", "decode-2"
# Where a move can be held, and at which of the two engines.
PHASES = {
    "decode.admit": READER,
    "send_handoff": OLD,
    "start_read": READER,
    "end_read": READER,
    "check_digests": READER,
    "send_confirm": OLD,
}
PATIENCE_S = 120.0


@contextmanager
def running(folder: Path, faults: Path, lag: int = 1) -> Iterator[MovingSystem]:
    """Three decode engines that compute their prompts, with faults of their own."""
    base = tiny_settings("decode", folder, lag=lag)
    decodes = []
    for name in (OLD, READER, OTHER):
        (faults / name).mkdir()
        decodes.append(replace(base, testing=FaultSettings(fault_dir=str(faults / name))))
    system = MovingSystem(decodes, None)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


class Scene:
    """Some streams, one of which is on its way from OLD to READER."""

    def __init__(self, system: MovingSystem, router: Router, faults: Path) -> None:
        self.system, self.router, self.faults = system, router, faults

    async def generate(self, count: int, point: str | None, then: str) -> tuple[list[Generation], list[Generated]]:
        """point: where the move is held until `then` has been done."""
        asked = mixed(self.system, count, 100)
        with held_streams([self.system.decodes[OLD]], 20):
            running = [asyncio.create_task(collect(self.router, one)) for one in asked]
            attempt = await self._one_at_old()
            if point is not None:
                touch(self.faults / PHASES[point], f"hold.{point}")
            assert self.router._moves.start(attempt, LEAVING)
        if point is not None:
            await until(lambda: (self.faults / PHASES[point] / f"did.hold.{point}").exists())
        if then != "goes on":
            await self.die(then)
        for held in self.faults.glob("*/hold.*"):
            held.unlink()
        return asked, await asyncio.gather(*running)

    async def _one_at_old(self) -> Attempt:
        self.router._moves._leaving.add(OTHER)  # so that nobody is moved to there

        def here() -> list[Attempt]:
            here = [one for one in movable(self.router) if one.route.decode_id == OLD]
            return [one for one in here if one.leg.generation.spec.grammar is None]  # it has long to go

        await until(here)
        return here()[0]

    async def die(self, name: str) -> None:
        self.system.decode_pool.die(name)
        self.router.pools_changed(self.system.decode_pool.replicas())
        built = self.system.decodes[name]
        self.system.engines.remove(built)
        await asyncio.to_thread(built.stop)


async def until(condition: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def play(
    system: MovingSystem, faults: Path, point: str | None, then: str
) -> tuple[list[Generation], list[Generated]]:
    router = await system.start_router(max_retries=2, migration=MigrationLimits(admit_timeout_s=PATIENCE_S))
    try:
        return await Scene(system, router, faults).generate(6, point, then)
    finally:
        await router.stop()


DEATHS = [(point, who) for point in PHASES for who in (OLD, READER)]
IN_DEFAULT = {("start_read", OLD), ("check_digests", READER)}


@pytest.mark.parametrize(
    ("point", "who"),
    [pytest.param(*one, marks=() if one in IN_DEFAULT else pytest.mark.slow) for one in DEATHS],
)
def test_one_of_the_two_dies(
    point: str, who: str, tiny_folder: Path, tiny_reference: GrammarReference, tmp_path: Path
) -> None:
    with running(tiny_folder, tmp_path) as system:
        asked, generated = asyncio.run(play(system, tmp_path, point, who))
        check(tiny_reference, asked, generated)
    if (point, who) not in (("decode.admit", READER), ("decode.admit", OLD)):
        assert system.moved("lost") + system.moved("moved") > 0


def test_it_goes_on_wherever_it_was_held(tiny_folder: Path, tiny_reference: GrammarReference, tmp_path: Path) -> None:
    with running(tiny_folder, tmp_path) as system:
        for number, point in enumerate(PHASES):
            asked, generated = asyncio.run(play(system, tmp_path, point, "goes on"))
            check(tiny_reference, asked, generated)
            assert system.moved() == number + 1
        # Spoilt on its way: noticed, and replayed.
        touch(tmp_path / READER, "corrupt.received")
        check(tiny_reference, *asyncio.run(play(system, tmp_path, None, "goes on")))
        assert (tmp_path / READER / "did.corrupt.received").exists()
        assert system.moved("lost") == 1


def test_no_promise_in_time_and_it_stays(tiny_folder: Path, tiny_reference: GrammarReference, tmp_path: Path) -> None:
    async def refused(system: MovingSystem) -> tuple[list[Generation], list[Generated]]:
        router = await system.start_router(migration=MigrationLimits(admit_timeout_s=0.05))
        scene = Scene(system, router, tmp_path)
        asked = mixed(system, 6, 300)
        running = [asyncio.create_task(collect(router, one)) for one in asked]
        attempt = await scene._one_at_old()
        touch(tmp_path / READER, "hold.decode.admit")
        assert router._moves.start(attempt, LEAVING)
        await until(lambda: system.moved("refused"))
        assert attempt.move is None
        (tmp_path / READER / "hold.decode.admit").unlink()
        try:
            return asked, await asyncio.gather(*running)
        finally:
            await router.stop()

    with running(tiny_folder, tmp_path) as system:
        check(tiny_reference, *asyncio.run(refused(system)))
        assert not system.moved()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_moves_and_deaths_at_random(seed: int, tiny_folder: Path, tiny_reference: GrammarReference) -> None:
    """Four engines, of which two die while requests are on their way from and to them."""
    system = MovingSystem.tiny(tiny_folder, 4, has_prefill=False, lag=1, kv_capacity_tokens=8192)
    left, dead = [OTHER, READER], []

    def kill(router: Router) -> None:
        if left and system.moved() > 15 * (3 - len(left)):
            name = left.pop()
            system.decode_pool.die(name)
            router.pools_changed(system.decode_pool.replicas())
            dead.append(system.decodes[name])

    asked = mixed(system, 20, 100)
    generated = system.run_moving(asked, seed, meanwhile=kill, max_retries=4)
    check(tiny_reference, asked, generated)
    assert not left, "both have died"
    for built in dead:
        built.stop()
        system.engines.remove(built)
    asyncio.run(system.wait_for_baseline())
    system.close()
