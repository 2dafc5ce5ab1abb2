"""What a simulated router asks replicas now and then: how they are, and what they have cached since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.routing.pool_view import PoolView
from cluster.routing.prompt_forecast import PrefixForecasts
from cluster.simulation.simulated_engine import SimulatedEngine
from replicas.recent_part import recent_part


class PoolPulses:
    """One per router, as cluster.routing.watched_pool asks. tables: of the pools, by name."""

    def __init__(
        self, view: PoolView, forecasts: PrefixForecasts, tables: Mapping[str, Mapping[str, Mapping[str, Any]]]
    ) -> None:
        self._view, self._tables = view, tables
        self._feeds = {pool: forecasts.feed(pool) for pool in tables}

    def due(self, pool: str, now_s: float) -> list[str]:
        """Replicas that it asks now. Mutates: it has asked them."""
        feed = self._feeds[pool]
        return [] if feed is None else feed.due(now_s, self._tables[pool])

    def heard(self, pool: str, engine: SimulatedEngine) -> None:
        """What it says. Mutates."""
        self._view.heard_load(engine.replica_id, engine.load())
        feed, name, is_more = self._feeds[pool], engine.replica_id, True
        while feed is not None and is_more:
            after = feed.position(name)
            is_more = feed.heard(name, recent_part(engine.recent_keys, after), after)
