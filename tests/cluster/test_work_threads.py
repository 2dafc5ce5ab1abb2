"""Long work and short work do not wait for each other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.api_error import ApiError
from cluster.text.length import size_up_to
from cluster.text.work_threads import LONG, SHORT, WorkThreads

PATIENCE_S = 120.0


async def test_short_work_passes_long_work() -> None:
    threads, release, running = WorkThreads(), threading.Event(), threading.Semaphore(0)

    def hold() -> int:
        running.release()
        assert release.wait(PATIENCE_S)
        return 1

    long = [asyncio.ensure_future(threads.run(LONG + 1, hold)) for _ in range(40)]
    try:
        for _ in range(2):
            assert await asyncio.to_thread(running.acquire, timeout=PATIENCE_S)
        assert [await threads.run(LONG, len, "abc") for _ in range(20)] == [3] * 20
        assert not running.acquire(blocking=False), "more than two at a time"
    finally:
        release.set()
    assert await asyncio.gather(*long) == [1] * 40


async def test_not_any_amount_of_long_work_waits() -> None:
    threads, release = WorkThreads(), threading.Event()
    long = [asyncio.ensure_future(threads.run(LONG + 1, release.wait, PATIENCE_S)) for _ in range(256)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await threads.run(LONG + 1, len, "abc")
    assert (caught.value.status, caught.value.headers()) == (429, {"Retry-After": "2"})
    assert await threads.run(LONG, len, "abc") == 3
    long[-1].cancel()
    await asyncio.wait({long[-1]})
    release.set()
    assert await threads.run(LONG + 1, len, "abc") == 3, "who has gone made room"
    await asyncio.gather(*long[:-1])
    assert threads._num_long == 0


async def test_very_short_work_takes_no_thread() -> None:
    threads, here = WorkThreads(), threading.get_ident()
    assert [await threads.run(size, threading.get_ident) == here for size in (0, SHORT, SHORT + 1)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("size", [0, SHORT + 1, LONG + 1])
async def test_what_work_raises_comes_through(size: int) -> None:
    with pytest.raises(ValueError, match="no"):
        await WorkThreads().run(size, int, "no")


def test_sizes_are_counted_to_the_bound_and_not_further() -> None:
    messages = [{"role": "user", "content": "x" * 100}, {"tool_calls": [{"arguments": {"a": ["y" * 50]}}]}]
    assert 150 < size_up_to(messages, 1000) < 200
    assert size_up_to(messages, 99) > 99
    assert size_up_to([[]] * 10**6, 1000) > 1000
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert 1000 < size_up_to(deep, 1000) < 1010
