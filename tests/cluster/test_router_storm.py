"""Many requests at once, and everything that can go wrong: every text exact, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from replicas.messages import CallStatus, Frame, GenerateCall
from tests.cluster.fake_model import PLAIN, Fault, Phase, Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")


async def test_equal_prompts_in_flight_together_do_not_mix() -> None:
    generations = [generation_of(seed=seed, n=1 + seed % 3) for seed in (1, 2, 3, 1)]
    async with running_router(FakeCluster()) as rig:
        rig.cluster.script = lambda _: Script(token_s=0.001)
        assert await asyncio.gather(*map(rig.tokens, generations)) == [
            undisturbed(generation) for generation in generations
        ]


class Storm:
    """Faults drawn by who is asked, not by when: at most three in a row for the same choices of a request."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._asked: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._held: dict[str, Frame] = {}

    def script(self, call: GenerateCall) -> Script:
        who = call.spec.sampling.seed, call.spec.choices
        self._asked[who] += 1
        rng = random.Random(f"{who} {self._asked[who]}")
        times = (rng.choice((0.0, 0.0, 0.001, 0.003)) for _ in range(6))
        fault = None
        if rng.random() < 0.6 and self._asked[who] <= 3:
            phase = rng.choice([Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE, Phase.REPLY])
            hang = ["hang"] if phase in (Phase.PREFILL, Phase.TRANSFER, Phase.REPLY) else []
            replies = sorted({status for status in CallStatus if status.may_retry} - {"ok", "leaving"})
            what = rng.choice(["gone", "raise", "cancelled", *hang, *replies])
            fault = Fault(phase, what, steps=rng.randrange(4))
        return Script(fault, *times)

    def on_wire(self, frame: Frame) -> Iterable[Frame]:
        """One in twenty is lost, one in ten comes after the next, one in twenty twice."""
        before = self._held.pop(frame.replica_id, None)
        chance = self.rng.random()
        if chance < 0.1 and before is None:
            self._held[frame.replica_id] = frame
            return ()
        arrived = [] if chance < 0.15 else [frame, frame] if chance < 0.2 else [frame]
        return arrived if before is None else [*arrived, before]


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_hundred_requests_in_a_storm_of_faults(seed: int) -> None:
    storm = Storm(seed)
    generations = [
        generation_of(
            *(storm.rng.randrange(97) for _ in range(storm.rng.randrange(1, 9))),
            n=storm.rng.randrange(1, 4),
            max_tokens=storm.rng.randrange(1, 12),
            stop=storm.rng.sample(range(97), 5),
            seed=1000 * seed + i,
            temperature=storm.rng.choice((0.0, 1.0)),
        )
        for i in range(200)
    ]
    cluster = FakeCluster(num_decode=3, num_prefill=3, decode_blocks=120)
    async with running_router(cluster, max_retries=10, handoff_s=0.5, queue_s=20.0, tail_s=0.5, settle_s=0.01) as rig:
        cluster.script, cluster.on_wire = storm.script, storm.on_wire
        running = [rig.start(generation) for generation in generations]
        for leaver in storm.rng.sample(running, 30):
            asyncio.get_running_loop().call_later(storm.rng.random() * 0.2, leaver.cancel)
        alive = asyncio.create_task(rig.signs_of_life())
        await asyncio.wait(running)
        finished = [
            (generation, task) for generation, task in zip(generations, running, strict=True) if not task.cancelled()
        ]
        assert len(finished) >= 170
        for generation, task in finished:
            assert task.result() == undisturbed(generation)
        cluster.on_wire = lambda frame: (frame,)
        alive.cancel()
        await rig.settle()
        assert len(cluster.struck) > 80
        assert rig.count("splitserve_retries") >= len({fault.what for fault in cluster.struck})
        cluster.script = lambda _: PLAIN
        assert await rig.tokens(generations[0]) == undisturbed(generations[0])
