"""A wait in a queue ends when its time is up, however often the thread loses its CPU at the wrong moment."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path
from queue import Empty

import pytest

from replicas.timed_queue import TimedQueue

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def test_waits_of_a_microsecond_end_thirty_thousand_times() -> None:
    """queue.SimpleQueue stands still after a few thousand of them: see there."""
    items: TimedQueue[int] = TimedQueue()
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        for _ in range(30_000):
            items.put(1)
            assert items.get_nowait() == 1
            with pytest.raises(Empty):
                items.get(1e-6)
            num_turns += 1

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    while thread.is_alive():
        before = num_turns
        thread.join(PATIENCE_S)
        assert not thread.is_alive() or num_turns > before, f"it stands still after {num_turns} waits"
    assert num_turns == 30_000


def test_what_is_put_comes_in_order_and_wakes_who_waits() -> None:
    items: TimedQueue[tuple[int, int]] = TimedQueue()

    def put(source: int) -> None:
        for number in range(2_000):
            items.put((source, number))

    threads = [threading.Thread(target=put, args=(source,)) for source in range(3)]
    for thread in threads:
        thread.start()
    got = [items.get(PATIENCE_S) for _ in range(6_000)]
    for source in range(3):
        assert [number for at, number in got if at == source] == [*range(2_000)]
    with pytest.raises(Empty):
        items.get_nowait()


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_nothing_comes(timeout_s: float) -> None:
    items: TimedQueue[int] = TimedQueue()
    for _ in range(3):
        items.put(1)
        assert items.get(timeout_s) == 1
        began_s = time.monotonic()
        with pytest.raises(Empty):
            items.get(timeout_s)
        assert time.monotonic() - began_s >= timeout_s


@pytest.mark.parametrize("folder", ["cluster", "replicas", "benchmarks"])
def test_nobody_waits_for_a_time_in_a_simple_queue(folder: str) -> None:
    """A file that has one takes without a timeout."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        if "SimpleQueue" not in text.replace("queue.SimpleQueue:", ""):
            continue
        for node in ast.walk(ast.parse(text)):
            is_get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            assert not (is_get and [word for word in node.keywords if word.arg == "timeout"]), path
