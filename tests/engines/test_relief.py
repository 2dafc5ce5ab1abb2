"""A decode engine whose memory runs short gives requests to another one that has room, before it must put them away."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from cluster.routing.generation import Generation
from cluster.routing.router_limits import MigrationLimits
from replicas.model.model_runner import ModelRunner, StepHandle
from scheduler.admission import AdmissionPolicy
from scheduler.plan import StepPlan
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import Generated, collect
from tests.engines.moving_system import MovingSystem
from tests.engines.test_moving import check
from tests.engines.tiny_tokenizer import END_ID

# Taken to be two tokens long, they are 150: twelve of them need four times the memory that one engine has.
OPTIMISTIC = AdmissionPolicy(quantile=0.5, min_samples=1)
NUM_TOKENS = 150
STEP_S = 0.01


async def crowded(system: MovingSystem, limits: MigrationLimits) -> tuple[list[Generation], list[Generated]]:
    """All begin at one engine; then there is another."""
    router = await system.start_router(migration=limits)
    pool = system.decode_pool
    other = pool._pools.pop("decode-1")
    router.pools_changed(pool.replicas())
    prompts = [[(7 * number + 11 * index) % 500 for index in range(10)] for number in range(12)]
    asked = [system.generation(prompt, NUM_TOKENS, stop_token_ids=frozenset({END_ID})) for prompt in prompts]
    running = [asyncio.create_task(collect(router, one)) for one in asked]
    batch = system.decodes["decode-0"].engine.scheduler.batch
    while len(batch) < 8:
        await asyncio.sleep(0.001)
    pool._pools["decode-1"] = other
    router.pools_changed(pool.replicas())
    try:
        return asked, await asyncio.gather(*running)
    finally:
        await router.stop()


def build(folder: Path) -> MovingSystem:
    system = MovingSystem.tiny(folder, has_prefill=False, lag=1, kv_capacity_tokens=512, admission=OPTIMISTIC)
    for built in system.decodes.values():
        for _ in range(50):
            built.engine.scheduler.budget.choice_ended(2)
        slow_down(built.engine.runner)
    return system


def slow_down(runner: ModelRunner) -> None:
    """However fast the machine is, streams last for seconds: longer than a router waits between two moves."""
    launch = runner.launch

    def launch_late(plan: StepPlan) -> StepHandle:
        time.sleep(STEP_S)
        return launch(plan)

    runner.launch = launch_late  # type: ignore[method-assign]


def test_some_go_on_elsewhere(tiny_folder: Path, tiny_reference: GrammarReference) -> None:
    system = build(tiny_folder)
    check(tiny_reference, *asyncio.run(crowded(system, MigrationLimits())))
    asyncio.run(system.wait_for_baseline())
    system.close()
    assert system.moved() > 0
    assert not system.moved("lost")


def test_none_does_where_it_is_switched_off(tiny_folder: Path, tiny_reference: GrammarReference) -> None:
    system = build(tiny_folder)
    check(tiny_reference, *asyncio.run(crowded(system, MigrationLimits(relieve_memory=False))))
    asyncio.run(system.wait_for_baseline())
    preemption = system.decodes["decode-0"].engine.scheduler.preemption
    system.close()
    assert preemption.num_swapped + preemption.num_evicted > 0
    assert not system.moved()
