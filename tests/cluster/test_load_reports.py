"""Prefill replicas that are silent are asked, and what they say is known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.load_reports import LoadReports
from cluster.pool_client import PoolClient, ReplicaLost
from cluster.pool_view import PoolView
from cluster.replica_registry import ReplicaTable
from replicas.messages import EngineLoad
from tests.cluster.router_rig import until


class Pool(PoolClient):
    """Replica "lost" fails, "hangs" never answers; the others have as many tokens waiting as they were asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []

    def replicas(self) -> ReplicaTable:
        return {name: {"num_blocks": 100} for name in self.names}

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        assert (method, arguments) == ("load", ())
        self.asked.append(replica_id)
        if replica_id == "lost":
            raise ReplicaLost(replica_id, "has left", is_dead=False)
        if replica_id == "hangs":
            await asyncio.Event().wait()
        return EngineLoad(0, 0, 1000 + self.asked.count(replica_id), 1, 100, 0.0)


async def test_the_silent_are_asked_and_who_fails_does_not_keep_the_others_from_it() -> None:
    pool = Pool("a", "b", "lost", "hangs")
    view = PoolView(dict, pool.replicas)
    reports = LoadReports(pool, view, interval_s=0.02)
    reports.start()
    await until(lambda: pool.asked.count("a") >= 3 and pool.asked.count("hangs") >= 2)
    await reports.stop()
    queued = {candidate.replica_id: candidate.queued_tokens for candidate in view.prefill_candidates()}
    assert queued["a"] > 1001
    assert queued["b"] > 1001
    assert queued["lost"] == queued["hangs"] == 0


@pytest.mark.parametrize("names", [(), ("a",)])
async def test_without_a_choice_nobody_is_asked(names: tuple[str, ...]) -> None:
    pool = Pool(*names)
    reports = LoadReports(pool, PoolView(dict, pool.replicas), interval_s=0.01)
    reports.start()
    await asyncio.sleep(0.05)
    await reports.stop()
    assert pool.asked == []


async def test_who_has_just_said_it_is_not_asked() -> None:
    pool = Pool("a", "b")
    view = PoolView(dict, pool.replicas)
    reports = LoadReports(pool, view, interval_s=0.05)
    reports.start()
    for _ in range(30):
        view.heard_prefill("a", EngineLoad(0, 0, 7, 1, 100, 0.0))
        await asyncio.sleep(0.005)
    await reports.stop()
    assert "a" not in pool.asked
    assert "b" in pool.asked
