"""Everything once and in order, in as few batches as there were pauses; nothing lost to a cancelled consumer."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.routing.batch_queue import BatchQueue


async def test_one_batch_for_all_that_came_meanwhile() -> None:
    queue: BatchQueue[int] = BatchQueue()
    consumer = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    for item in range(3):
        queue.put(item)
    assert await consumer == [0, 1, 2]


async def test_what_is_there_can_be_taken_after_the_end() -> None:
    queue: BatchQueue[int] = BatchQueue()
    queue.put(1)
    queue.close()
    assert [await queue.take() for _ in range(3)] == [[1], [], []]


async def test_the_end_wakes_the_consumer() -> None:
    queue: BatchQueue[int] = BatchQueue()
    consumer = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.close()
    queue.close()
    assert await consumer == []


async def test_a_cancelled_consumer_loses_nothing() -> None:
    queue: BatchQueue[int] = BatchQueue()
    consumer = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.put(1)  # it has been woken, and has not run yet
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    queue.put(2)
    assert await queue.take() == [1, 2]


@pytest.mark.parametrize("seed", range(5))
async def test_any_interleaving_keeps_order(seed: int) -> None:
    rng = random.Random(seed)
    queue: BatchQueue[int] = BatchQueue()
    batches: list[list[int]] = []

    async def consume() -> None:
        while batch := await queue.take():
            batches.append(batch)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)

    consumer = asyncio.create_task(consume())
    for item in range(500):
        queue.put(item)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    queue.close()
    await consumer
    assert [item for batch in batches for item in batch] == list(range(500))
    assert len(batches) < 500
