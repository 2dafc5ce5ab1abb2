"""A whole system of two decode engines in one process, whose running requests are moved from one to the other again and
again, at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.attempt import Attempt
from cluster.routing.generation import Generation
from cluster.routing.moves import LEAVING
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.serving.engine_builder import BuiltEngine, build_engine
from replicas.settings import EngineSettings
from tests.engines.local_pools import ManyLocal
from tests.engines.local_system import Generated, LocalSystem, collect
from tests.engines.tiny_model import tiny_settings


class MovingSystem(LocalSystem):
    """Two decode engines, or more, and a prefill engine if there are settings for it."""

    def __init__(self, decodes: Sequence[EngineSettings], prefill: EngineSettings | None) -> None:
        self.decodes = {f"decode-{n}": build_engine(one, f"decode-{n}") for n, one in enumerate(decodes)}
        self.prefills = {"prefill-0": build_engine(prefill, "prefill-0")} if prefill is not None else {}
        self.engines: list[BuiltEngine] = [*self.decodes.values(), *self.prefills.values()]
        for built in self.engines:
            built.start()
        self.metrics = IngressMetrics("test", "test", "test")
        self._num_generations = 0

    @staticmethod
    def tiny(folder: Path, num_decode: int = 2, has_prefill: bool = True, **changes: Any) -> MovingSystem:
        """Of the tiny model."""
        decodes = [tiny_settings("decode", folder, **changes) for _ in range(num_decode)]
        return MovingSystem(decodes, tiny_settings("prefill", folder, **changes) if has_prefill else None)

    async def start_router(self, **limits: Any) -> Router:
        self.decode_pool = ManyLocal(self.decodes)
        prefill = ManyLocal(self.prefills) if self.prefills else None
        attempt = AttemptLimits(300.0, limits.pop("handoff_s", 60.0))
        values = {"max_queued_requests": 1000, "max_retries": 0, "block_size": 16, **limits}
        router = Router(
            decode=self.decode_pool,
            prefill=prefill,
            rules=RoutingRules(prefill is not None, local_prefill_max_tokens=0, fallback_to_decode=False),
            limits=RouterLimits(attempt=attempt, **values),
            metrics=self.metrics,
            channel_host="127.0.0.1",
            has_prefix_cache=next(iter(self.decodes.values())).settings.has_prefix_cache,
        )
        await router.start()
        router.pools_changed(self.decode_pool.replicas())
        return router

    def moved(self, outcome: str = "moved") -> float:
        """How many moves came to this."""
        (family,) = (family for family in self.metrics.snapshot() if family["name"] == "splitserve_migrations")
        return sum(v for suffix, of, v in family["samples"] if suffix == "_total" and of["outcome"] == outcome)

    def run_moving(
        self,
        generations: Sequence[Generation],
        seed: int = 0,
        every_s: float = 0.003,
        meanwhile: Callable[[Router], None] = lambda _: None,
        **limits: Any,
    ) -> list[Generated]:
        """Side by side, each to its end, while some of them is moved every every_s. meanwhile: called as often."""
        return asyncio.run(self._run_moving(generations, random.Random(seed), every_s, meanwhile, limits))

    async def _run_moving(
        self,
        generations: Sequence[Generation],
        rng: random.Random,
        every_s: float,
        meanwhile: Callable[[Router], None],
        limits: dict[str, Any],
    ) -> list[Generated]:
        router = await self.start_router(**limits)
        moving = asyncio.create_task(_move_all(router, rng, every_s, meanwhile))
        try:
            return await asyncio.gather(*(collect(router, generation) for generation in generations))
        finally:
            moving.cancel()
            await asyncio.wait({moving})
            await router.stop()
            if not moving.cancelled() and (error := moving.exception()) is not None:
                raise error


def movable(router: Router) -> list[Attempt]:
    """Who could be moved now."""
    return [attempt for here in router._moves._running.values() for attempt in here if attempt.may_move]


async def _move_all(router: Router, rng: random.Random, every_s: float, meanwhile: Callable[[Router], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        meanwhile(router)
        if able := movable(router):
            router._moves.start(rng.choice(able), LEAVING)
