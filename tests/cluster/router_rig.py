"""A router in front of fake pools, that must be back at zero at the end: calls, tasks, mailboxes, counts, memory."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.generation import Generation
from cluster.routing.router import Router
from cluster.routing.router_limits import AttemptLimits, MigrationLimits, RouterLimits
from replicas.messages import Token
from tests.cluster.fake_model import Token as Generated
from tests.cluster.fake_pools import BLOCK_SIZE, FakeCluster

PATIENCE_S = 5.0  # of a router: what it waits for where a test says nothing
# Of one whose time is the clock's, and goes on while the machine stands still.
PATIENT: dict[str, Any] = dict.fromkeys(("queue_s", "handoff_s", "tail_s", "frozen_after_s", "settle_s"), 120.0)
_LONGEST_S = 120.0  # that a test waits, on a machine that is busy or stands still for seconds
Tokens = dict[int, list[Generated]]


@dataclass
class Rig:
    """metrics: count(name, labels). problems: what asyncio told its exception handler."""

    cluster: FakeCluster
    router: Router
    metrics: IngressMetrics
    baseline: set[asyncio.Task[Any]] = field(default_factory=set)
    problems: list[dict[str, Any]] = field(default_factory=list)

    async def tokens(self, generation: Generation) -> Tokens:
        """Consume a generation to its end."""
        got: Tokens = {choice: [] for choice in generation.spec.choices}
        async with aclosing(self.router.generate(generation)) as batches:
            async for batch in batches:
                for token in batch:
                    assert isinstance(token, Token)
                    got[token.choice].append((token.token_id, token.finish_reason))
        return got

    async def signs_of_life(self) -> None:
        """Until cancelled, what idle engines send twice a second, more often."""
        while True:
            await asyncio.sleep(0.01)
            await self.cluster.signs_of_life(self.router._intake.address)

    def start(self, generation: Generation) -> asyncio.Task[Tokens]:
        return asyncio.create_task(self.tokens(generation))

    def count(self, name: str, **labels: str) -> float:
        """A counter's value, summed over the labels not given."""
        (family,) = (family for family in self.metrics.snapshot() if family["name"] == name)
        wanted = labels.items()
        return sum(v for suffix, of, v in family["samples"] if suffix == "_total" and wanted <= of.items())

    def remains(self) -> dict[str, Any]:
        """Everything that must be empty once nothing is going on."""
        view = self.router._view
        tasks = asyncio.all_tasks() - self.baseline - {asyncio.current_task()}
        every = {
            "tasks": tasks,
            "calls": [call for call in self.cluster.calls if call.end is None],
            "mailboxes": len(self.router._mailboxes),
            "waiting": self.router.num_waiting,
            "demand": self.router.demand.num_open + self.router.demand.coming_prompt_tokens,
            "in flight": dict(view._in_flight),
            "unheard": dict(view._unheard_blocks),
            "prompts": dict(view._prompt_tokens),
            "coming": {ids: state.num_coming for ids, state in view.pairs._states.items() if state.num_coming},
            "handoffs": self.cluster.handoffs,
            "running": self.cluster.running or self.cluster.stops,
            "moves": self.router._moves._running or self.router._moves._paused,
            "memory": sum(r.used_blocks + r.num_queued for pool in self.cluster.pools for r in pool.members.values()),
        }
        return {name: value for name, value in every.items() if value}

    async def settle(self) -> None:
        """Wait until nothing remains; fails telling what does."""
        await until(lambda: not self.remains(), self.remains)


@asynccontextmanager
async def running_router(
    cluster: FakeCluster,
    *,
    max_queued: int = 1000,
    max_retries: int = 3,
    queue_s: float = PATIENCE_S,
    handoff_s: float = PATIENCE_S,
    tail_s: float = PATIENCE_S,
    local_prefill_max_tokens: int = 0,
    fallback: bool = False,
    local_by_cost: bool = True,
    retry_delay_s: float = 0.001,
    frozen_after_s: float = PATIENCE_S,
    recovery_s: float = 0.0,
    may_be_empty: Collection[str] = (),
    cold_start_s: float = PATIENCE_S,
    settle_s: float = PATIENCE_S,
    tokenizer: str = "",
    migrates: bool = True,
) -> AsyncIterator[Rig]:
    gc.freeze()  # what is there already need not be searched for tasks that nobody awaited
    metrics = IngressMetrics("model", "1", "2")
    router = Router(
        decode=cluster.decode,
        prefill=cluster.prefill,
        rules=RoutingRules(
            cluster.prefill is not None, local_prefill_max_tokens, fallback, local_by_cost=local_by_cost
        ),
        limits=RouterLimits(
            max_queued,
            max_retries,
            BLOCK_SIZE,
            AttemptLimits(queue_s, handoff_s, tail_s),
            retry_delay_s=retry_delay_s,
            frozen_after_s=frozen_after_s,
            recovery_timeout_s=recovery_s,
            cold_start_timeout_s=cold_start_s,
            settle_s=settle_s,
            migration=MigrationLimits(enabled=migrates),
        ),
        metrics=metrics,
        channel_host="127.0.0.1",
        tokenizer=tokenizer,
        has_prefix_cache=cluster.has_prefix_cache,
    )
    router.let_be_empty(may_be_empty)
    rig = Rig(cluster, router, metrics)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: rig.problems.append(context))
    await router.start()
    router.pools_changed(cluster.decode.replicas())
    cluster.receiver = router._intake.receiver
    rig.baseline = asyncio.all_tasks()
    try:
        yield rig
        await rig.settle()
    finally:
        cluster.receiver = None
        await router.stop()
        cluster.close()
    gc.collect()
    await asyncio.sleep(0)
    assert not rig.problems, rig.problems
    assert router._intake.receiver.counts.callback_errors == 0


async def until(condition: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not in time: {why()}"
        await asyncio.sleep(0.001)
