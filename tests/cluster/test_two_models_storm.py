"""An update from one model to another in a storm of faults: every request is answered by one of them, whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.routing.generation import Generation
from cluster.routing.model_binding import ModelBinding
from replicas.messages import GenerateCall
from replicas.model_identity import model_of
from tests.cluster.fake_model import Phase, Script, generation_of, undisturbed
from tests.cluster.router_rig import Rig, Tokens, running_router
from tests.cluster.test_router_storm import Storm
from tests.cluster.test_two_models import A, B, cluster_of, join

pytestmark = pytest.mark.usefixtures("skipped_waits")

NUM_REQUESTS = 60


class UpdateStorm(Storm):
    def script(self, request: GenerateCall) -> Script:
        """Nothing hangs where decode computes the prompt: nobody but the clock of the whole request would notice."""
        script = super().script(request)
        is_hang = script.fault is not None and (script.fault.phase, script.fault.what) == (Phase.TRANSFER, "hang")
        return replace(script, fault=None) if is_hang else script


def prompts_of(storm: Storm, number: int) -> list[Generation]:
    """One to three prompts of one request."""
    binding = ModelBinding()
    return [
        replace(
            generation_of(
                *(storm.rng.randrange(97) for _ in range(storm.rng.randrange(1, 9))),
                n=storm.rng.randrange(1, 4),
                max_tokens=storm.rng.randrange(1, 12),
                seed=10 * number + part,
                temperature=storm.rng.choice((0.0, 1.0)),
            ),
            binding=binding,
        )
        for part in range(storm.rng.randrange(1, 4))
    ]


async def update(rig: Rig, storm: Storm) -> None:
    """Replicas of both models are killed or leave, one after the other; each has a successor a moment later."""
    number = 0
    while True:
        await asyncio.sleep(0.03)
        number += 1
        pool = storm.rng.choice(("decode", "prefill"))
        of = rig.cluster.decode if pool == "decode" else rig.cluster.prefill
        assert of is not None
        victim = storm.rng.choice(sorted(of.members))
        model = of.members[victim].fingerprint
        if storm.rng.random() < 0.5:
            rig.cluster.kill(victim)
        rig.cluster.remove(victim)
        rig.router.pools_changed(rig.cluster.decode.replicas())
        await asyncio.sleep(0.02)
        join(rig, pool, f"{pool}-again-{number}", model if storm.rng.random() < 0.7 or len(of.members) < 3 else A)
        have = {replica.fingerprint for replica in of.members.values()}
        for missing in {A, B} - have:
            join(rig, pool, f"{pool}-new-{number}", missing)


@pytest.mark.parametrize("seed", [2])
async def test_each_request_is_answered_by_one_model_whole(seed: int) -> None:
    storm = UpdateStorm(seed)
    requests = [prompts_of(storm, number) for number in range(NUM_REQUESTS)]
    cluster = cluster_of("ab", "abab")
    async with running_router(
        cluster,
        max_retries=12,
        handoff_s=0.5,
        queue_s=20.0,
        tail_s=0.5,
        recovery_s=5.0,
        fallback=True,
        settle_s=0.01,
    ) as rig:
        cluster.script, cluster.on_wire = storm.script, storm.on_wire
        alive = asyncio.create_task(rig.signs_of_life())
        updating = asyncio.create_task(update(rig, storm))
        running: list[list[asyncio.Task[Tokens]]] = []
        for generations in requests:
            running.append([rig.start(generation) for generation in generations])
            await asyncio.sleep(0.01)
        await asyncio.wait([task for tasks in running for task in tasks])
        assert not updating.done(), updating
        updating.cancel()
        whose = set()
        for generations, tasks in zip(requests, running, strict=True):
            texts = [task.result() for task in tasks]
            models = [m for m in (A, B) if texts == [undisturbed(generation, m) for generation in generations]]
            assert models, "a request with texts of both models, or of neither"
            assert generations[0].binding.model in map(model_of, models)
            whose.update(models)
        assert whose == {A, B}
        cluster.on_wire = lambda frame: (frame,)
        alive.cancel()
        await rig.settle()
        assert len(cluster.struck) > 20
