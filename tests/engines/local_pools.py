"""A whole system of several engines a pool in one process, without Ray; any of them can die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.generation import Generation
from cluster.routing.pool_client import Loss, PoolClient, ReplicaLost
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.serving.engine_builder import BuiltEngine, build_engine
from replicas.settings import EngineSettings
from scheduler.plan import StepPlan
from tests.engines.local_system import Generated, LocalPool, collect

PATIENCE_S = 120.0


class ManyLocal(PoolClient):
    """Engines as one pool."""

    def __init__(self, engines: dict[str, BuiltEngine]) -> None:
        self._pools = {name: LocalPool(name, built) for name, built in engines.items()}
        self._open: dict[str, set[asyncio.Task[Any]]] = {name: set() for name in engines}

    def replicas(self) -> ReplicaTable:
        return {name: about for pool in self._pools.values() for name, about in pool.replicas().items()}

    async def submit(self, replica_id: str, call: Any) -> Any:
        if replica_id not in self._pools:
            raise ReplicaLost(replica_id, Loss.DEAD, "the test has ended it")
        asked = asyncio.ensure_future(self._pools[replica_id].submit(replica_id, call))
        self._open[replica_id].add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            if replica_id in self._pools:
                asked.cancel()
                raise
            raise ReplicaLost(replica_id, Loss.DEAD, "the test has ended it") from None
        finally:
            self._open[replica_id].discard(asked)

    def die(self, replica_id: str) -> None:
        """Nothing that it was asked is answered, and it is asked nothing any more."""
        del self._pools[replica_id]
        for asked in list(self._open[replica_id]):
            asked.cancel()


class ManySystem:
    """Use from one event loop at a time through `run`."""

    def __init__(self, decodes: Sequence[EngineSettings], prefills: Sequence[EngineSettings]) -> None:
        self.decodes = {f"decode-{n}": build_engine(one, f"decode-{n}") for n, one in enumerate(decodes)}
        self.prefills = {f"prefill-{n}": build_engine(one, f"prefill-{n}") for n, one in enumerate(prefills)}
        for built in (*self.decodes.values(), *self.prefills.values()):
            built.start()

    def close(self) -> None:
        for built in (*self.decodes.values(), *self.prefills.values()):
            built.stop()

    def run(
        self, generations: Sequence[Generation], kill_after: int | None = None, num_at_once: int = 1000
    ) -> list[Generated]:
        """Side by side, so many at once. kill_after: when so many tokens have come, the first decode engine dies.
        Blocks."""
        return asyncio.run(self._run(generations, kill_after, num_at_once))

    async def _run(
        self, generations: Sequence[Generation], kill_after: int | None, num_at_once: int
    ) -> list[Generated]:
        decode = ManyLocal(self.decodes)
        prefill = ManyLocal(self.prefills) if self.prefills else None
        limits = RouterLimits(
            attempt=AttemptLimits(300.0, 60.0), max_queued_requests=1000, max_retries=4, block_size=16
        )
        rules = RoutingRules(prefill is not None, local_prefill_max_tokens=0, fallback_to_decode=False)
        router = Router(
            decode=decode, prefill=prefill, rules=rules, limits=limits,
            metrics=IngressMetrics("test", "test", "test"), channel_host="127.0.0.1",
        )  # fmt: skip
        await router.start()
        router.pools_changed(decode.replicas())
        killing = None
        if kill_after is not None:
            is_due, has_died = self._stands_still_after(kill_after)
            killing = asyncio.create_task(self._kill(router, decode, is_due, has_died))
        places = asyncio.Semaphore(num_at_once)

        async def collected(generation: Generation) -> Generated:
            async with places:
                return await collect(router, generation)

        try:
            return await asyncio.gather(*map(collected, generations))
        finally:
            if killing is not None:
                await killing
            await router.stop()

    def _stands_still_after(self, kill_after: int) -> tuple[threading.Event, threading.Event]:
        """The first decode engine takes no further step then, until it has died: else it might be through before."""
        engine, is_due, has_died = self.decodes["decode-0"].engine, threading.Event(), threading.Event()
        launch = engine._launch

        def launched(plan: StepPlan) -> Any:
            if engine.scheduler.batch.num_forwarded_tokens >= kill_after:
                is_due.set()
                assert has_died.wait(PATIENCE_S)
            return launch(plan)

        engine._launch = launched  # type: ignore[method-assign]
        return is_due, has_died

    async def _kill(
        self, router: Router, decode: ManyLocal, is_due: threading.Event, has_died: threading.Event
    ) -> None:
        victim = self.decodes["decode-0"]
        while not is_due.is_set():
            await asyncio.sleep(0.001)
        assert victim.engine.calls.by_id, "it dies in the middle of something"
        decode.die("decode-0")
        router.pools_changed(decode.replicas())
        has_died.set()
        await asyncio.to_thread(victim.engine.stop)
