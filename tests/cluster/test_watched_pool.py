"""The watch over a pool goes on whatever happens in one of its ticks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cluster.routing.pool_client import Loss, PoolClient, ReplicaLost
from cluster.routing.pulse_table import PulseRules
from cluster.routing.replica_registry import ReplicaRegistry, ReplicaTable
from cluster.routing.watched_pool import WatchedPool
from replicas.messages import ForgetPeerCall

PATIENCE_S = 120.0


class SilentPool(PoolClient):
    """One replica that answers nothing; who is there can't be told at first."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    def replicas(self) -> ReplicaTable:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(24, "Too many open files")
        return {"a": {"some": "metadata"}}

    async def submit(self, replica_id: str, call: Any) -> Any:
        raise AssertionError("nobody submits")

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_frozen_replica_is_found_though_ticks_before_have_failed(caplog: pytest.LogCaptureFixture) -> None:
    losses: list[tuple[str, Loss]] = []
    pool = SilentPool(num_failures=3)
    rules = PulseRules(frozen_after_s=0.1, ask_after_s=0.05, interval_s=0.01)
    watched = WatchedPool("decode", pool, rules, lambda *loss: losses.append(loss), lambda *_: None)
    watched.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not losses:
                await asyncio.sleep(0.01)
    finally:
        await watched.stop()
    assert losses == [("decode", Loss.FROZEN)]
    assert pool.num_failures == 0
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the watch over a pool failed; it goes on"
    ]


class HangingPool(SilentPool):
    """It takes calls, too, and answers none."""

    async def submit(self, replica_id: str, call: Any) -> Any:
        await asyncio.Event().wait()


async def test_calls_that_are_lost_together_end_in_the_order_in_which_they_came() -> None:
    """They are tried again in it: who came first is not the last to find room elsewhere."""
    rules = PulseRules(frozen_after_s=0.1, ask_after_s=1000.0, interval_s=0.01)
    watched = WatchedPool("decode", HangingPool(0), rules, lambda *_: None, lambda *_: None)
    ended: list[int] = []

    async def call(number: int) -> None:
        with pytest.raises(ReplicaLost):
            await watched.submit("a", ForgetPeerCall(str(number)))
        ended.append(number)

    watched.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(call(number) for number in range(50)))
    finally:
        await watched.stop()
    assert ended == list(range(50))


def test_nobody_sees_a_table_before_the_listeners_know_it() -> None:
    """A router's loop that sends something to a new replica, while Serve's thread stands still between the table and
    the router's listener: the replica's frames are let in only when that one has been told."""
    registry, told, seen = ReplicaRegistry(), threading.Event(), list[tuple[bool, bool]]()

    def look() -> None:
        seen.append(("a" in registry.replicas("decode"), told.is_set()))

    reader = threading.Thread(target=look)

    def stand_still(*_: object) -> None:
        reader.start()
        reader.join(0.3)
        told.set()

    registry.listen(stand_still)
    registry.update("decode", {"a": {"epoch": "1"}})
    reader.join(60.0)
    assert seen in ([(True, True)], [(False, False)])


def test_who_begins_to_listen_hears_of_no_older_table_behind_a_newer_one() -> None:
    registry, heard = ReplicaRegistry(), list[list[str]]()
    registry.update("decode", {"a": {"epoch": "1"}})
    update = threading.Thread(target=registry.update, args=("decode", {"b": {"epoch": "1"}}))

    def listen(_: str, table: ReplicaTable) -> None:
        if "a" in table:
            update.start()
            update.join(0.3)
        heard.append(list(table))

    registry.listen(listen)
    update.join(60.0)
    assert heard == [["a"], ["b"]]


def test_a_listener_that_fails_costs_neither_serve_nor_the_others_their_news() -> None:
    """It is called on the thread by which Serve learns of replicas; an ingress may have ended meanwhile."""
    registry, heard = ReplicaRegistry(), list[str]()

    def ended(deployment: str, table: ReplicaTable) -> None:
        raise RuntimeError("Event loop is closed")

    registry.listen(ended)
    registry.listen(lambda deployment, table: heard.append(deployment))
    registry.update("decode", {"a": {"some": "metadata"}})
    assert heard == ["decode"]
    assert registry.replicas("decode") == {"a": {"some": "metadata"}}
