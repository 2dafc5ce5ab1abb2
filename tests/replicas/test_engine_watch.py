"""Standing still is told from working and from waiting, by real threads and by a script of looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from replicas.engine.engine_watch import EngineWatch, Progress, StallMeter, Watched, cpu_ticks

PATIENCE_S = 20.0


@contextmanager
def thread(body: Callable[[threading.Event], None]) -> Iterator[threading.Thread]:
    ended = threading.Event()
    running = threading.Thread(target=body, args=(ended,), daemon=True)
    running.start()
    try:
        yield running
    finally:
        ended.set()
        running.join()


def stand_still(ended: threading.Event) -> None:
    ended.wait()


def compute(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.01)


# looks: (time, beat, cpu ticks) -> stalled seconds
LOOKS = {
    "its loop comes round": [(0.0, 1, 5, 0.0), (0.5, 2, 5, 0.0), (1.0, 3, 5, 0.0)],
    "a long step": [(0.0, 1, 5, 0.0), (0.5, 1, 30, 0.0), (1.0, 1, 31, 0.0)],
    "it stands still": [(0.0, 1, 5, 0.0), (0.5, 1, 5, 0.5), (1.0, 1, 5, 1.0), (1.5, 1, 6, 0.0)],
    "the process was stopped for an hour": [(0.0, 1, 5, 0.0), (0.5, 1, 5, 0.5), (3600.0, 1, 5, 1.5)],
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_meter_by_a_script_of_looks(name: str) -> None:
    meter = StallMeter(interval_s=0.5)
    for now_s, beat, ticks, stalled_s in LOOKS[name]:
        assert meter.look(now_s, Progress(beat, ticks)) == stalled_s


def test_a_thread_that_stands_still_ends_the_process_and_one_that_computes_does_not() -> None:
    ends: list[int] = []
    with thread(stand_still) as still, thread(compute) as busy:
        working = EngineWatch({"busy": Watched(busy, lambda: 0.0)}, 0.5, ends.append, interval_s=0.1)
        frozen = EngineWatch(
            {"busy": Watched(busy, lambda: 0.0), "still": Watched(still, lambda: 0.0)}, 0.5, ends.append
        )
        working.start()
        time.sleep(1.5)
        assert working.stalled_s < 0.5
        assert ends == []
        frozen.start()
        wait_until(lambda: bool(ends))
        assert frozen.stalled_s >= 0.5
        working.stop()


def test_a_beat_is_enough_and_a_thread_that_has_ended_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[int] = []
    with thread(stand_still) as still:
        beats = EngineWatch({"still": Watched(still, time.monotonic)}, 0.3, ends.append, interval_s=0.05)
        beats.start()
        time.sleep(0.6)
        assert (beats.stalled_s, ends) == (0.0, [])
        beats.stop()
    wait_until(lambda: cpu_ticks(still) is None)  # the system forgets a thread a moment after Python has joined it
    over = EngineWatch({"over": Watched(still, lambda: 0.0)}, 0.1, ends.append, interval_s=0.05)
    over.start()
    time.sleep(0.4)
    assert ends == []
    over.stop()


def test_the_log_says_where_it_stood(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[int] = []
    with thread(stand_still) as still:
        watch = EngineWatch({"engine": Watched(still, lambda: 0.0)}, 0.2, ends.append, interval_s=0.05)
        watch.start()
        wait_until(lambda: bool(ends))
    (record,) = (record for record in caplog.records if "stands still" in record.message)
    assert "in stand_still" in record.message
    assert record.levelname == "CRITICAL"
