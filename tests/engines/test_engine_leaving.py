"""Real engines: prefill waits for the readers of its leases, and one that stands still is told from a busy one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.routing.router import Router
from replicas.engine.engine_watch import EngineWatch
from replicas.settings import FaultSettings
from tests.engines.local_system import LocalSystem, collect, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def goldens(tiny_goldens: TinyGoldens) -> list[Golden]:
    return [tiny_goldens.of(num_tokens) for num_tokens in (15, 16, 33)]


@pytest.fixture(scope="module")
def system(faults: Path, tiny_goldens: TinyGoldens) -> Iterator[LocalSystem]:
    decode, prefill = (
        tiny_settings(pool, tiny_goldens.folder, testing=FaultSettings(str(faults))) for pool in ("decode", "prefill")
    )
    system = LocalSystem(decode, prefill)
    yield system
    system.close()


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.02)


def test_prefill_is_drained_only_when_its_readers_are_done(
    system: LocalSystem, goldens: list[Golden], faults: Path
) -> None:
    """The prompts are computed and answered: nothing is open but the leases, until decode has read."""
    assert system.prefill is not None
    prefill, decode = system.prefill, system.decode

    async def run() -> None:
        router = await system.start_router()
        try:
            touch(faults, "hold.start_read")
            running = [asyncio.create_task(collect(router, system.generation(g.prompt_ids, 16))) for g in goldens]
            await until(lambda: prefill.transfers.snapshot().leases_open == len(goldens))
            await until(lambda: not prefill.engine.status.ledger.num_active)
            await asyncio.sleep(0.3)
            assert not prefill.is_drained
            assert not decode.is_drained
            (faults / "hold.start_read").unlink()
            for golden, task in zip(goldens, running, strict=True):
                assert (await task).token_ids == {0: golden.output_ids[:16]}
            await until(lambda: prefill.is_drained and decode.is_drained)
        finally:
            await router.stop()

    assert prefill.is_drained
    asyncio.run(run())


def test_an_engine_that_stands_still_is_told_from_one_that_works(
    system: LocalSystem, goldens: list[Golden], faults: Path
) -> None:
    """Saturated first: no alarm. Then its thread is stopped in the middle: an alarm, and everything goes on after.

    A thread that a disk keeps waiting stands still too, for once: then it is watched anew.
    """
    ends: list[int] = []
    watch_s = 1.5
    watch = EngineWatch(system.decode.watched(), watch_s, ends.append, interval_s=0.1)

    async def works_without_an_alarm(router: Router) -> bool:
        nonlocal watch
        watch.stop()
        ends.clear()
        watch = EngineWatch(system.decode.watched(), watch_s, ends.append, interval_s=0.1)
        watch.start()
        busy_until_s = time.monotonic() + 2 * watch_s
        while time.monotonic() < busy_until_s:
            await asyncio.gather(*(collect(router, system.generation([7] * 300, 40)) for _ in range(6)))
        return ends == []

    async def run() -> None:
        router = await system.start_router()
        try:
            assert await works_without_an_alarm(router) or await works_without_an_alarm(router)
            golden = goldens[0]
            touch(faults, "hold.decode.step")  # it is not over before anybody has seen it
            task = asyncio.create_task(collect(router, system.generation(golden.prompt_ids, 64)))
            await until(lambda: system.decode.engine.status.ledger.num_active == 1)
            touch(faults, "freeze.decode.thread")
            (faults / "hold.decode.step").unlink()
            await until(lambda: bool(ends))
            assert watch.stalled_s >= watch_s
            (faults / "freeze.decode.thread").unlink()
            assert (await task).token_ids == {0: golden.output_ids}
        finally:
            await router.stop()

    try:
        asyncio.run(run())
    finally:
        watch.stop()
    assert (faults / "did.freeze.decode.thread").exists()
