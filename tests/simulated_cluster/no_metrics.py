"""Metrics that nobody reads, but for those that say what a simulation came to."""

from __future__ import annotations

from typing import Any

from tests.simulated_cluster.world import World


class NoMetrics:
    """Takes everything and does nothing with it."""

    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = self  # not asked for again
        return self

    def __call__(self, *values: Any, **labels: Any) -> None:
        return None


class RouterMetrics(NoMetrics):
    """Counts retries and moves in what the world has seen."""

    def __init__(self, world: World) -> None:
        self._world = world

    def retried(self, stage: str) -> None:
        self._world.seen[f"retry: {stage}"] += 1

    def migrated(self, cause: str, outcome: str) -> None:
        self._world.seen[f"move: {outcome}"] += 1
