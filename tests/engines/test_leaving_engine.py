"""A decode engine says that it leaves: what runs there goes on elsewhere, and it is empty long before any text ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.routing.generation import Generation
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import Generated, collect
from tests.engines.moving_system import MovingSystem
from tests.engines.test_moving import check, mixed

NUM_TOKENS = 200


async def leave(system: MovingSystem, count: int, name: str) -> tuple[list[Generation], list[Generated], int]:
    """Asked, generated, and how many were still running when the engine had nothing left."""
    router = await system.start_router()
    asked = mixed(system, count, NUM_TOKENS)
    running = [asyncio.create_task(collect(router, one)) for one in asked]
    engine = system.decodes[name].engine
    batch = engine.scheduler.batch
    while not len(batch) or batch.num_forwarded_tokens < 5 * len(batch):
        await asyncio.sleep(0.002)
    engine.leave()
    try:
        while engine.calls.by_id or engine.scheduler.ledger().num_leased:
            assert not all(task.done() for task in running), "it has ended them all"
            await asyncio.sleep(0.002)
        num_running = sum(not task.done() for task in running)
        return asked, await asyncio.gather(*running), num_running
    finally:
        await router.stop()


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_who_leaves_is_empty_while_all_goes_on(lag: int, tiny_folder: Path, tiny_reference: GrammarReference) -> None:
    system = MovingSystem.tiny(tiny_folder, 3, lag=lag, kv_capacity_tokens=16384)
    asked, generated, num_running = asyncio.run(leave(system, 16, "decode-0"))
    check(tiny_reference, asked, generated)
    asyncio.run(system.wait_for_baseline())
    system.close()
    assert system.moved() >= 2
    assert not system.moved("lost")
    assert num_running > 0
