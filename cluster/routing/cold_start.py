"""Requests that wait for the first replica of a pool: autoscaling has emptied it, or all it had are lost or silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import Need, RoutingRules
from cluster.routing.order_book import OrderBook
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.router_limits import RouterLimits

logger = logging.getLogger(__name__)

# Somebody tells when a replica has come; this is for a word that got lost.
_LOOK_AGAIN_S = 1.0
_LEAST_RETRY_S = 10.0


class ColdStart:
    """One per router, on its event loop. Whom it holds is in the demand that autoscaling sees."""

    def __init__(
        self,
        rules: RoutingRules,
        limits: RouterLimits,
        metrics: IngressMetrics,
        orders: OrderBook,
        is_silent: Callable[[str], bool],
    ) -> None:
        """is_silent: whether somebody of this pool does not answer now, and may do so again."""
        self._rules, self._limits, self._metrics = rules, limits, metrics
        self._orders, self._is_silent = orders, is_silent
        self._pools: Mapping[str, Callable[[], ReplicaTable]] = {}
        self._came = asyncio.Event()
        self.num_held = 0
        self.held_blocks = 0  # what they will use on decode
        self.held_prompt_tokens = 0

    def watch(self, pools: Mapping[str, Callable[[], ReplicaTable]]) -> None:
        """pools: replicas of those that may be empty while all is well, by name; not those that are leaving."""
        self._pools = pools

    def wake(self) -> None:
        """A pool has changed, or somebody of it answers again."""
        self._came.set()
        self._came = asyncio.Event()

    def empty_pool(self, need: Need) -> str | None:
        """A pool that the request needs, that may be empty, and that is."""
        for name, replicas in self._pools.items():
            if not replicas() and (name == "decode" or self._needs_prefill(need)):
                return name
        return None

    async def wait(self, need: Need, max_held: int | None, deadline_s: float, waited_s: float = 0.0) -> None:
        """Until every pool that the request needs and that may be empty has a replica. deadline_s: monotonic, of the
        whole request. max_held: None for one that was let in before, and has lost its replica. waited_s: how long it
        has waited before, which counts.

        Raises ApiError: 429 when max_held wait already, 503 when none comes in time.
        """
        await self._hold(need, lambda: self.empty_pool(need), max_held, deadline_s, waited_s)

    async def wait_for_others(
        self,
        need: Need,
        lacks: Callable[[], str | None],
        max_held: int | None,
        deadline_s: float,
        waited_s: float = 0.0,
    ) -> None:
        """Until no pool lacks a replica for it, or none can be hoped for any more: none is on its way there, and for
        those that stand still it has waited as long as anybody may for room, or a moment. lacks: the pool that does,
        now; the rest as of `wait`."""
        limits = self._limits.attempt
        room_until_s = time.monotonic() + max(limits.queue_timeout_s - waited_s, limits.moment_s)

        def awaited() -> str | None:
            pool = lacks()
            if pool is None or self._orders.coming(pool).num:
                return pool
            return pool if self._is_silent(pool) and time.monotonic() < room_until_s else None

        await self._hold(need, awaited, max_held, deadline_s, waited_s)

    async def _hold(
        self, need: Need, awaited: Callable[[], str | None], max_held: int | None, deadline_s: float, waited_s: float
    ) -> None:
        """awaited: the pool whose first replica it waits for, now."""
        if (pool := awaited()) is None:
            return
        if max_held is not None and self.num_held >= max_held:
            self._metrics.rejected("queue_full")
            raise ApiError(
                429,
                f"{self.num_held} requests wait for the first {pool} replica to {self._what(pool)}, the most allowed; "
                "try again later",
                code="queue_full",
                retry_after_s=self._retry_after_s(pool),
            )
        extra = {"event": "cold_start", "pool": pool, "num_held": self.num_held}
        logger.info("held until a first replica is there to %s", self._what(pool), extra=extra)
        began_s = time.monotonic()
        self.num_held += 1
        self.held_blocks += need.decode_blocks
        self.held_prompt_tokens += need.prompt_tokens
        try:
            until_s = began_s - waited_s + self._limits.cold_start_timeout_s
            await self._wait(awaited, min(deadline_s, until_s))
        finally:
            self.num_held -= 1
            self.held_blocks -= need.decode_blocks
            self.held_prompt_tokens -= need.prompt_tokens
            self._metrics.cold_start_wait.observe(time.monotonic() - began_s)

    async def _wait(self, awaited: Callable[[], str | None], until_s: float) -> None:
        while (pool := awaited()) is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                self._metrics.rejected("no_capacity")
                message = f"no {pool} replica has started within the time that a request may wait; try again later"
                raise ApiError(503, message, code="unavailable", retry_after_s=self._retry_after_s(pool))
            try:
                async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                    await self._came.wait()
            except TimeoutError:
                continue

    def _what(self, pool: str) -> str:
        """What it waits for: those that stand still are not replaced yet."""
        return "answer" if self._is_silent(pool) and not self._orders.coming(pool).num else "start"

    def _retry_after_s(self, pool: str) -> float:
        return max(_LEAST_RETRY_S, self._orders.next_in_s(pool))

    def _needs_prefill(self, need: Need) -> bool:
        rules = self._rules
        return not rules.fallback_to_decode and need.prompt_tokens > rules.local_prefill_max_tokens
