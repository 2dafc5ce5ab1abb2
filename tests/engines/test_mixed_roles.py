"""Engines of two pools that may each do both phases: whatever part goes where, texts are those of one engine alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.policy_table import POLICIES
from cluster.policies.routing_policy import Costs, RouteKind, RoutingPolicy, RoutingRules
from cluster.routing.generation import Generation
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.serving.engine_builder import BuiltEngine, build_engine
from scheduler.sampling_params import SamplingParams
from tests.engines.local_pools import ManyLocal
from tests.engines.local_system import Generated, LocalSystem, collect, settings

NAMES = ("decode-0", "decode-1", "prefill-0", "prefill-1")


class MixedSystem:
    """Two engines a pool, all of which may do both."""

    def __init__(self) -> None:
        self.engines: dict[str, BuiltEngine] = {}
        for name in NAMES:
            of_engine = settings(name.split("-")[0], may_also=True, kv_capacity_tokens=4096)
            self.engines[name] = build_engine(of_engine, name)
            self.engines[name].start()
        self.metrics = IngressMetrics("test", "test", "test")

    def close(self) -> None:
        for built in self.engines.values():
            built.stop()

    def run(self, generations: Sequence[Generation], policy: str, num_at_once: int = 1000) -> list[Generated]:
        """Side by side. Blocks."""
        return asyncio.run(self._run(generations, policy, num_at_once))

    async def _run(self, generations: Sequence[Generation], policy: str, num_at_once: int) -> list[Generated]:
        decode, prefill = (
            ManyLocal({name: built for name, built in self.engines.items() if name.startswith(pool)})
            for pool in ("decode", "prefill")
        )
        router = Router(
            decode=decode,
            prefill=prefill,
            rules=RoutingRules(True, 0, False, policy=policy),
            limits=RouterLimits(AttemptLimits(300.0, 60.0), max_queued_requests=1000, max_retries=2, block_size=16),
            metrics=self.metrics,
            channel_host="127.0.0.1",
        )
        await router.start()
        router.pools_changed(decode.replicas())
        places = asyncio.Semaphore(num_at_once)

        async def collected(generation: Generation) -> Generated:
            async with places:
                return await collect(router, generation)

        try:
            return await asyncio.gather(*map(collected, generations))
        finally:
            await router.stop()
            await self._wait_for_baseline()

    async def _wait_for_baseline(self) -> None:
        """Nothing is held anywhere."""
        async with asyncio.timeout(20.0):
            while not all(built.is_drained for built in self.engines.values()):
                await asyncio.sleep(0.01)
        for name, built in self.engines.items():
            ledger = built.engine.scheduler.ledger()
            assert ledger.blocks.unowned == ledger.blocks.total, (name, ledger)
            assert not ledger.promised_blocks, (name, ledger)
            assert not ledger.used_slots, (name, ledger)


@pytest.fixture(scope="module")
def mixed() -> Iterator[MixedSystem]:
    system = MixedSystem()
    yield system
    system.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalSystem]:
    """What texts are compared with: one engine that does everything."""
    system = LocalSystem(settings("decode"), None)
    yield system
    system.close()


@pytest.fixture
def by_chance(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """A policy that sends every part anywhere. Counted: who generated, and who computed the prompt."""
    rng = random.Random(1)
    routes: Counter[tuple[str, str]] = Counter()

    def costs(need: object, candidates: Sequence[object], *_: object) -> Costs:
        return [(rng.random(),) for _ in candidates]

    def why_local(need: object, prefill: object, decode: object, *_: object) -> RouteKind | None:
        return RouteKind.MIXED if rng.random() < 0.3 else None

    monkeypatch.setitem(POLICIES, "chance", RoutingPolicy(costs, costs, why_local))  # type: ignore[arg-type]
    open_attempt = Router._open_attempt

    def noted(self: Router, leg: object, route: object, deadline_s: float) -> object:
        routes[route.decode_id, route.prefill_id or route.decode_id] += 1  # type: ignore[attr-defined]
        return open_attempt(self, leg, route, deadline_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "_open_attempt", noted)
    return routes


def generations_of(system: LocalSystem, count: int) -> list[Generation]:
    """Greedy, seeded and of several choices; of one step and of several."""
    made: list[Generation] = []
    for number in range(count):
        rng = random.Random(number)
        prompt_ids = [rng.randrange(1, 200) for _ in range(rng.choice((5, 40, 300)))]
        sampling = SamplingParams(temperature=0.0 if number % 3 == 0 else 0.8, seed=number)
        made.append(system.generation(prompt_ids, rng.choice((1, 4, 24)), sampling, num_choices=1 + (number % 4 == 1)))
    return made


def test_texts_do_not_depend_on_who_plays_which_role(
    mixed: MixedSystem, alone: LocalSystem, by_chance: Counter[tuple[str, str]]
) -> None:
    generations = generations_of(alone, 60)
    expected = alone.run(generations)
    got = mixed.run(generations, "chance")
    for of_alone, of_mixed in zip(expected, got, strict=True):
        assert of_mixed.token_ids == of_alone.token_ids
        assert of_mixed.finish_reasons == of_alone.finish_reasons
    assert sum(by_chance.values()) == 60, "nothing was tried again"
    pools = Counter((decode.split("-")[0], prefill.split("-")[0]) for decode, prefill in by_chance.elements())
    assert set(pools) == {(one, other) for one in ("decode", "prefill") for other in ("decode", "prefill")}
    assert any(decode == prefill for decode, prefill in by_chance), "some computed their prompts themselves"
    for pool in ("decode", "prefill"):
        for role in ("decode", "prefill"):
            assert mixed.metrics.roles_played.value(of_pool=pool, role=role) > 0


def test_the_shipped_policy_serves_as_one_engine_does(mixed: MixedSystem, alone: LocalSystem) -> None:
    generations = generations_of(alone, 30)
    expected = alone.run(generations)
    got = mixed.run(generations, "roles_by_cost")
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
