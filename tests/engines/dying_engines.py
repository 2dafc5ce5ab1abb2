"""A router in front of engines of which any can die, by a test's word or by a request that they compute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, RouterLimits
from replicas.engine.open_call import OpenCall
from replicas.messages import Frame
from replicas.serving.engine_builder import BuiltEngine, build_engine
from replicas.settings import EngineSettings
from scheduler.plan import StepPlan
from scheduler.request import Request
from tests.engines.local_pools import ManyLocal


@dataclass
class DyingEngines:
    """Each decodes, and computes its prompts. deaths: names, in order. A dead one stands still: nothing leaves it."""

    engines: dict[str, BuiltEngine]
    pool: ManyLocal
    deaths: list[str] = field(default_factory=list)
    router: Router | None = None
    _heard: set[str] = field(default_factory=set)  # request ids that were told admitted
    _ended: threading.Event = field(default_factory=threading.Event)

    def open_at(self, name: str) -> list[OpenCall]:
        """Calls that this engine has not answered."""
        return list(self.engines[name].engine.calls.by_id.values())

    @property
    def are_all_known(self) -> bool:
        """Whether each of them sends to the router."""
        return all(built.engine.sender._channels for built in self.engines.values())

    def die(self, name: str) -> None:
        """On the router's event loop."""
        self.deaths.append(name)
        self.pool.die(name)
        assert self.router is not None
        self.router.pools_changed(self.pool.replicas())

    def dies_of(self, is_poison: Callable[[Request], bool]) -> None:
        """Whoever has such a request in a step dies before any of it is known, but for what it had sent by then. On the
        router's event loop."""
        loop = asyncio.get_running_loop()
        for name, built in self.engines.items():
            engine, launch = built.engine, built.engine._launch

            def launched(plan: StepPlan, name: str = name, engine: Any = engine, launch: Any = launch) -> Any:
                requests = [engine.scheduler.get(part.request_id) for part in plan.slices]
                poison = [request for request in requests if request is not None and is_poison(request)]
                if poison:
                    admitted = {request.request_id for request in requests if request is not None}
                    asyncio.run_coroutine_threadsafe(self._die_heard(name, admitted), loop)
                    self._ended.wait()
                return launch(plan)

            engine._launch = launched  # type: ignore[method-assign]

    async def _die_heard(self, name: str, admitted: set[str]) -> None:
        """When what it sent has come: of a real process Ray's word comes later too."""
        while not admitted <= self._heard:
            await asyncio.sleep(0.001)
        self.die(name)

    def _delivered(self, deliver: Callable[[Frame], None], frame: Frame) -> None:
        deliver(frame)
        self._heard.update(frame.admitted)

    @asynccontextmanager
    async def routed(self, queue_s: float, max_retries: int = 2) -> AsyncIterator[Router]:
        self.router = Router(
            decode=self.pool,
            prefill=None,
            rules=RoutingRules(False, local_prefill_max_tokens=0, fallback_to_decode=False),
            limits=RouterLimits(
                attempt=AttemptLimits(queue_s, 60.0), max_queued_requests=1000, max_retries=max_retries, block_size=16
            ),
            metrics=IngressMetrics("test", "test", "test"),
            channel_host="127.0.0.1",
        )
        mailboxes = self.router._mailboxes
        mailboxes.deliver = partial(self._delivered, mailboxes.deliver)  # type: ignore[method-assign]
        await self.router.start()
        self.router.pools_changed(self.pool.replicas())
        try:
            yield self.router
        finally:
            await self.router.stop()

    def close(self) -> None:
        self._ended.set()
        for built in self.engines.values():
            built.stop()


@contextmanager
def dying_engines(settings: EngineSettings, number: int) -> Iterator[DyingEngines]:
    engines = {f"decode-{n}": build_engine(settings, f"decode-{n}") for n in range(number)}
    for built in engines.values():
        built.start()
    system = DyingEngines(engines, ManyLocal(engines))
    try:
        yield system
    finally:
        system.close()


class AdmissionLog:
    """What one engine's queue was asked, and did: (what, request), in order. Begins when it is made."""

    def __init__(self, built: BuiltEngine) -> None:
        scheduler = built.engine.scheduler
        self.entries: list[tuple[str, Request]] = []
        self._submit, self._admit = scheduler.submit, scheduler.admit
        scheduler.submit = self._submitted  # type: ignore[method-assign]
        scheduler.admit = self._admitted  # type: ignore[method-assign]

    def _submitted(self, request: Request, now_s: float) -> None:
        self._submit(request, now_s)
        self.entries.append(("submitted", request))

    def _admitted(self, now_s: float) -> tuple[Request, ...]:
        admitted = self._admit(now_s)
        self.entries += [("admitted", request) for request in admitted]
        return admitted

    def newcomers_before_begun(self) -> list[str]:
        """Newcomers that were let in while one that has begun waited."""
        waiting: set[str] = set()
        found = []
        for what, request in self.entries:
            if what == "submitted" and request.has_begun:
                waiting.add(request.request_id)
            elif what == "admitted" and request.has_begun:
                waiting.discard(request.request_id)
            elif what == "admitted" and waiting:
                found.append(request.request_id)
        return found
