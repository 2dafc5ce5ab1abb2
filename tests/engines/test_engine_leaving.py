"""Real engines: prefill waits for the readers of its leases, and one that stands still is told from a busy one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicas.engine_watch import EngineWatch
from tests.engines.local_system import LocalSystem, collect, settings, touch
from tests.golden.golden_set import load_goldens

GOLDENS = [golden for golden in load_goldens() if 15 <= len(golden.prompt_ids) <= 33][:3]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def system(faults: Path) -> Iterator[LocalSystem]:
    system = LocalSystem(settings("decode", fault_dir=str(faults)), settings("prefill", fault_dir=str(faults)))
    yield system
    system.close()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.02)


def test_prefill_is_drained_only_when_its_readers_are_done(system: LocalSystem, faults: Path) -> None:
    """The prompts are computed and answered: nothing is open but the leases, until decode has read."""
    assert system.prefill is not None
    prefill, decode = system.prefill, system.decode

    async def run() -> None:
        router = await system.start_router()
        try:
            touch(faults, "hold.start_read")
            running = [asyncio.create_task(collect(router, system.spec(g.prompt_ids, 16))) for g in GOLDENS]
            await until(lambda: prefill.transfers.snapshot().leases_open == len(GOLDENS))
            await until(lambda: not prefill.engine.status.ledger.num_active)
            await asyncio.sleep(0.3)
            assert not prefill.is_drained
            assert not decode.is_drained
            (faults / "hold.start_read").unlink()
            for golden, task in zip(GOLDENS, running, strict=True):
                assert (await task).token_ids == {0: golden.output_ids[:16]}
            await until(lambda: prefill.is_drained and decode.is_drained)
        finally:
            await router.stop()

    assert prefill.is_drained
    asyncio.run(run())


def test_an_engine_that_stands_still_is_told_from_one_that_works(system: LocalSystem, faults: Path) -> None:
    """Saturated first: no alarm. Then its thread is stopped in the middle: an alarm, and everything goes on after."""
    ends: list[int] = []
    watch = EngineWatch(system.decode.watched(), 1.5, ends.append, interval_s=0.1)
    watch.start()

    async def run() -> None:
        router = await system.start_router()
        try:
            running = [asyncio.create_task(collect(router, system.spec([7] * 300, 40))) for _ in range(6)]
            await asyncio.gather(*running)
            assert ends == []
            golden = GOLDENS[0]
            task = asyncio.create_task(collect(router, system.spec(golden.prompt_ids, 64)))
            await until(lambda: system.decode.engine.status.ledger.num_active == 1)
            touch(faults, "freeze.decode.thread")
            await until(lambda: bool(ends), 30.0)
            assert watch.stalled_s >= 1.5
            (faults / "freeze.decode.thread").unlink()
            assert (await task).token_ids == {0: golden.output_ids}
        finally:
            await router.stop()

    try:
        asyncio.run(run())
    finally:
        watch.stop()
    assert (faults / "did.freeze.decode.thread").exists()
