"""Time of a simulation: it goes on only when nobody has anything to do, and a hang is an error."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.routing.pool_view import PoolView
from replicas.kv import handoff_source
from replicas.kv.handoff_actions import HandoffTiming
from tests.simulated_cluster.virtual_time import START_S, GoesRound, NothingToDo, virtual_time


def test_hours_pass_at_once_and_in_order() -> None:
    order = []

    async def wake(after_s: float) -> None:
        await asyncio.sleep(after_s)
        order.append((after_s, asyncio.get_running_loop().time() - START_S))

    async def several() -> None:
        await asyncio.gather(wake(3600.0), wake(1.0), wake(7200.0))

    began_s = time.monotonic()
    with virtual_time() as stage:
        stage.run(several)
    assert order == [(1.0, 1.0), (3600.0, 3600.0), (7200.0, 7200.0)]
    assert time.monotonic() - began_s < 60.0


def test_who_waits_for_nothing_is_found() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with virtual_time() as stage, pytest.raises(NothingToDo):
        stage.run(wait)


def test_who_goes_round_is_found() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with virtual_time() as stage, pytest.raises(GoesRound):
        stage.run(spin)


def test_our_clocks_are_the_simulations_until_its_end() -> None:
    """Also those that are arguments' defaults."""

    async def look() -> tuple[float, ...]:
        await asyncio.sleep(5.0)
        view = PoolView(dict, dict)
        return view._clock(), asyncio.get_running_loop().time()

    with virtual_time() as stage:
        assert stage.run(look) == (START_S + 5.0, START_S + 5.0)
    assert PoolView(dict, dict)._clock is time.monotonic
    assert handoff_source.HandoffSource("e", HandoffTiming()).num_open == 0


def test_tasks_end_in_the_same_order_whatever_their_addresses() -> None:
    """A TaskGroup cancels a set of them; sets go by hashes, and a task's own is its address."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(1.0)
        finally:
            order.append(number)

    async def fail() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(number)) for number in range(50)]
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks)
            raise KeyError

    with virtual_time() as stage, pytest.raises(ExceptionGroup):
        stage.run(fail)
    assert order == list(range(50))
