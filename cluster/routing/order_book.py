"""What one router knows of replicas on their way: ordered by the config or by autoscaling, and not there yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from cluster.routing.replica_orders import Arrivals, ReplicaOrders, StartTime, arrivals
from cluster.routing.replica_registry import ReplicaTable

logger = logging.getLogger(__name__)


class OrderMetrics(Protocol):
    """Told of what changes, by pool."""

    def on_their_way(self, pool: str, num_replicas: int, start_s: float) -> None: ...


class OrderBook:
    """One per router, on its event loop. A pool that nothing is known of has nobody on the way.

    clock: monotonic seconds.
    """

    def __init__(
        self, metrics: OrderMetrics, longest_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """longest_wait_s: for a replica that was ordered; a start that takes longer is warned of."""
        self._metrics, self._longest_wait_s, self._clock = metrics, longest_wait_s, clock
        self._guesses_s: Mapping[str, float] = {}
        self._targets: dict[str, int] = {}
        self._tables: dict[str, ReplicaTable] = {}
        self._orders: dict[str, ReplicaOrders] = {}
        self._starts: dict[str, StartTime] = {}
        self._came_s: dict[str, float] = {}
        self._warned: set[str] = set()

    def expect(self, guesses_s: Mapping[str, float]) -> None:
        """These are the pools, and how long a start is taken to take in each before one was measured."""
        self._guesses_s = guesses_s
        for pool, guess_s in guesses_s.items():
            known = self._starts.get(pool, StartTime(guess_s))
            self._starts[pool] = StartTime(guess_s, known.told_s, known.measured_s)

    def wanted(self, targets: Mapping[str, int]) -> None:
        """So many replicas each pool is to have now, by name. Of other deployments too: they are left alone."""
        for pool in self._guesses_s:
            if pool in targets:
                self._targets[pool] = targets[pool]
                self._look(pool)

    def present(self, pool: str, table: ReplicaTable) -> None:
        """These are the pool's replicas now, without those that leave."""
        self._tables[pool] = table
        self._look(pool)

    def coming(self, pool: str) -> Arrivals:
        """What may be hoped for of it now."""
        orders = self._orders.get(pool)
        if orders is None or pool not in self._starts:
            return Arrivals()
        return arrivals(self._clock(), orders, self._starts[pool], self._came_s.get(pool, 0.0))

    def start_s(self, pool: str) -> float:
        """How long a start is taken to take; 0.0 for a pool that nothing is known of."""
        return self._starts[pool].expected_s if pool in self._starts else 0.0

    def next_in_s(self, pool: str) -> float:
        """When its next replica is expected, from now on; where none is on its way, or too long, after as long as a
        start takes. 0.0 for a pool that nothing is known of."""
        coming = self.coming(pool)
        return coming.next_s - self._clock() if coming.num else self.start_s(pool)

    def _look(self, pool: str) -> None:
        if pool not in self._starts:
            return
        now_s, table = self._clock(), self._tables.get(pool, {})
        before = self._orders.get(pool, ReplicaOrders())
        told_s = max((of.get("start_s", 0.0) for of in table.values()), default=0.0)
        start = self._starts[pool]
        start = StartTime(start.guess_s, told_s or start.told_s, start.measured_s)
        self._orders[pool], came = before.seen(now_s, self._targets.get(pool), list(table))
        for start_s in came:
            self._came_s[pool] = now_s
            if start_s is not None:
                start = start.measured(start_s)
                extra = {"event": "replica_came", "pool": pool, "start_s": round(start_s, 1)}
                logger.info("a %s replica that was ordered is there after %.1f s", pool, start_s, extra=extra)
        self._starts[pool] = start
        num_ordered = len(self._orders[pool].orders)
        if num_ordered != len(before.orders):
            extra = {"event": "replicas_ordered", "pool": pool, "num": num_ordered}
            logger.info("%s replicas on their way: %d", pool, num_ordered, extra=extra)
        self._metrics.on_their_way(pool, num_ordered, start.expected_s)
        self._warn(pool, max(start.told_s, *start.measured_s, 0.0))

    def _warn(self, pool: str, start_s: float) -> None:
        """Once, of each pool. start_s: what one took; of a guess `check` warns (`cluster.launch.fit`)."""
        if start_s > self._longest_wait_s and pool not in self._warned:
            self._warned.add(pool)
            logger.warning(
                "a %s replica takes %.0f s to start, requests wait at most ingress.cold_start_timeout_s, %g s",
                pool,
                start_s,
                self._longest_wait_s,
                extra={"event": "start_longer_than_wait", "pool": pool, "start_s": round(start_s, 1)},
            )
