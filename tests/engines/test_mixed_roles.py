"""Engines of two pools that may each do both phases: whatever part goes where, texts are those of one engine alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.policy_table import POLICIES
from cluster.policies.routing_policy import Costs, Route, RouteKind, RoutingPolicy, RoutingRules
from cluster.routing.admission_wait import AdmissionWait
from cluster.routing.attempt import Attempt
from cluster.routing.attempt_failed import AttemptHistory
from cluster.routing.generation import Generation, Leg
from cluster.routing.moves import LEAVING
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.serving.engine_builder import BuiltEngine, build_engine
from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.engines.local_pools import ManyLocal
from tests.engines.local_system import Generated, collect, settings
from tests.engines.moving_system import movable

pytestmark = pytest.mark.timeout(900)  # on a machine that does much else

NAMES = ("decode-0", "prefill-0")
NUM_GENERATIONS = 16


class MixedSystem:
    """An engine a pool, both of which may do both."""

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

    def run(
        self, generations: Sequence[Generation], policy: str, names: Sequence[str] = NAMES, moves: bool = False
    ) -> list[Generated]:
        """Side by side. names: of the engines that there are. moves: whatever runs goes on elsewhere, again and again.
        Blocks."""
        return asyncio.run(self._run(generations, policy, names, moves))

    async def _run(
        self, generations: Sequence[Generation], policy: str, names: Sequence[str], moves: bool
    ) -> list[Generated]:
        decode, prefill = (
            ManyLocal({name: self.engines[name] for name in names if name.startswith(pool)})
            for pool in ("decode", "prefill")
        )
        router = Router(
            decode=decode,
            prefill=prefill,
            rules=RoutingRules(True, 0, False, policy=policy),
            limits=RouterLimits(
                attempt=AttemptLimits(300.0, 60.0), max_queued_requests=1000, max_retries=2, block_size=16
            ),
            metrics=self.metrics,
            channel_host="127.0.0.1",
        )
        await router.start()
        router.pools_changed(decode.replicas())
        moving = asyncio.create_task(move_all(router)) if moves else None
        try:
            return await asyncio.gather(*(collect(router, generation) for generation in generations))
        finally:
            if moving is not None:
                moving.cancel()
                await asyncio.wait({moving})
            await router.stop()
            await self._wait_for_baseline()

    def counts(self, name: str, label: str) -> Counter[str]:
        """A counter's values, by those of a label."""
        (family,) = (one for one in self.metrics.snapshot() if one["name"] == name)
        counts: Counter[str] = Counter()
        for suffix, of, value in family["samples"]:
            if suffix == "_total":
                counts[of[label]] += int(value)
        return counts

    async def _wait_for_baseline(self) -> None:
        """Nothing is held anywhere."""
        async with asyncio.timeout(120.0):
            while not all(built.is_drained for built in self.engines.values()):
                await asyncio.sleep(0.01)
        for name, built in self.engines.items():
            ledger = built.engine.scheduler.ledger()
            assert ledger.blocks.unowned == ledger.blocks.total, (name, ledger)
            assert not ledger.promised_blocks, (name, ledger)
            assert not ledger.used_slots, (name, ledger)


async def move_all(router: Router) -> None:
    """Each request, as soon as it runs, to the other engine. Until cancelled."""
    while True:
        await asyncio.sleep(0.001)
        for attempt in movable(router):
            router._moves.start(attempt, LEAVING)


@pytest.fixture(scope="module")
def mixed() -> Iterator[MixedSystem]:
    system = MixedSystem()
    yield system
    system.close()


@pytest.fixture(scope="module")
def expected(mixed: MixedSystem) -> list[Generated]:
    """What one engine makes of them that does everything."""
    with pytest.MonkeyPatch.context() as patch:
        routes = note_routes(patch)
        patch.setitem(POLICIES, "alone", RoutingPolicy(decode_first, decode_first, lambda *_: RouteKind.MIXED))
        generated = mixed.run(generations(), "alone")
    assert routes == {("decode-0", "decode-0"): NUM_GENERATIONS}
    return generated


def decode_first(need: object, candidates: Sequence[Any], *_: object) -> Costs:
    return [(candidate.replica_id != "decode-0",) for candidate in candidates]


def note_routes(patch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Of all attempts from now on: who generates, and who computes the prompt."""
    routes: Counter[tuple[str, str]] = Counter()
    open_attempt = Router._open_attempt

    def noted(
        self: Router, leg: Leg, past: AttemptHistory, deadline_s: float, route: Route, *before: AdmissionWait | None
    ) -> Attempt:
        routes[route.decode_id, route.prefill_id or route.decode_id] += 1
        return open_attempt(self, leg, past, deadline_s, route, *before)

    patch.setattr(Router, "_open_attempt", noted)
    return routes


def generations() -> list[Generation]:
    """Greedy, seeded and of several choices; of one step and of several."""
    made: list[Generation] = []
    for number in range(NUM_GENERATIONS):
        rng = random.Random(number)
        prompt_ids = tuple(rng.randrange(1, 200) for _ in range(rng.choice((5, 40, 140))))
        sampling = SamplingParams(temperature=0.0 if number % 3 == 0 else 0.8, seed=number)
        choices = (0, 1) if number % 4 == 1 else (0,)
        spec = GenerationSpec(prompt_ids, choices, rng.choice((1, 3, 8)), frozenset(), sampling)
        made.append(Generation(f"generation-{number}", spec, 300.0))
    return made


def test_texts_do_not_depend_on_who_plays_which_role(
    mixed: MixedSystem, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)

    def costs(need: object, candidates: Sequence[object], *_: object) -> Costs:
        return [(rng.random(),) for _ in candidates]

    def why_local(*_: object) -> RouteKind | None:
        return RouteKind.MIXED if rng.random() < 0.3 else None

    monkeypatch.setitem(POLICIES, "chance", RoutingPolicy(costs, costs, why_local))
    routes, before = note_routes(monkeypatch), mixed.counts("splitserve_retries", "stage")
    for of_alone, of_mixed in zip(expected, mixed.run(generations(), "chance"), strict=True):
        assert of_mixed.token_ids == of_alone.token_ids
        assert of_mixed.finish_reasons == of_alone.finish_reasons
    assert sum(routes.values()) >= NUM_GENERATIONS, "who waits may go elsewhere"
    assert mixed.counts("splitserve_retries", "stage") == before, "something was tried again"
    assert set(routes) == {(one, other) for one in NAMES for other in NAMES}
    (family,) = (one for one in mixed.metrics.snapshot() if one["name"] == "splitserve_router_roles")
    played = [sample for sample in family["samples"] if sample[0].endswith("_total")]
    assert len(played) == 4, "each pool in each role"
    assert all(sample[2] > 0 for sample in played), played


def test_running_requests_move_from_one_pool_to_the_other(
    mixed: MixedSystem, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever generates may be of either pool, and so may the engine that it goes on at."""
    rng = random.Random(2)

    def costs(need: object, candidates: Sequence[object], *_: object) -> Costs:
        return [(rng.random(),) for _ in candidates]

    monkeypatch.setitem(POLICIES, "chance", RoutingPolicy(costs, costs, lambda *_: RouteKind.MIXED))
    before = mixed.counts("splitserve_migrations", "outcome")
    moved = mixed.run(generations(), "chance", moves=True)
    assert [one.token_ids for one in moved] == [one.token_ids for one in expected]
    outcomes = mixed.counts("splitserve_migrations", "outcome") - before
    assert outcomes["moved"] > 0, outcomes
    assert not outcomes["lost"], outcomes


def test_the_shipped_policy_serves_as_one_engine_does(mixed: MixedSystem, expected: list[Generated]) -> None:
    assert [one.token_ids for one in mixed.run(generations(), "roles_by_cost")] == [one.token_ids for one in expected]


def test_the_prefill_pool_serves_alone(
    mixed: MixedSystem, expected: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all decode replicas have died: what may do both does."""
    routes = note_routes(monkeypatch)
    got = mixed.run(generations()[:4], "roles_by_cost", names=("prefill-0",))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected[:4]]
    assert routes == {("prefill-0", "prefill-0"): 4}
