"""Standing still is told from working and from waiting, by real threads and by a script of looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from replicas.engine.engine_watch import EngineWatch, Progress, StallMeter, Watched, cpu_use

PATIENCE_S = 120.0


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
    "the process was stopped for an hour": [(0.0, 1, 5, 0.0), (0.5, 1, 5, 0.5), (3600.5, 1, 5, 0.5), (3601, 1, 5, 1.0)],
    "the watch gets half of the time it needs": [(0.0, 1, 5, 0.0), (1.0, 1, 5, 0.25), (2.0, 1, 5, 0.5)],
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_meter_by_a_script_of_looks(name: str) -> None:
    meter = StallMeter(interval_s=0.5)
    for now_s, beat, ticks, stalled_s in LOOKS[name]:
        assert meter.look(now_s, Progress(beat, ticks)) == pytest.approx(stalled_s, abs=1e-3)


def test_who_waits_for_a_cpu_does_not_stand_still_and_is_not_taken_for_one_that_has_got_on() -> None:
    meter = StallMeter(interval_s=0.5)
    states = [False, False, True, True, True, False]
    stalled = [meter.look(0.5 * n, Progress(1, 5, is_ready)) for n, is_ready in enumerate(states)]
    assert stalled == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]


def watch_of(meter: StallMeter, looks: list[tuple[float, bool]], restart_after_s: float) -> float | None:
    """When, in seconds on the clock, a watch would end the process: at each look the thread is where it was."""
    now_s = 0.0
    for elapsed_s, is_ready in looks:
        now_s += elapsed_s
        if meter.look(now_s, Progress(1, 5, is_ready)) >= restart_after_s:
            return now_s
    return None


def test_a_machine_without_cpu_is_not_a_hang_and_a_hang_on_it_is_found_later() -> None:
    """Looks as they were measured with 40 computing processes on 2 cores: a minute and a half of them in a row without
    a tick of CPU time, which is worse than any that was seen."""
    late_s = [0.91, 0.05, 1.4, 0.3, 6.6, 0.9, 12.4, 0.2, 0.91, 2.3]
    looks = [(0.5 + late, number % 3 == 0) for number, late in enumerate(late_s * 4)]
    assert sum(elapsed_s for elapsed_s, _ in looks) > 90
    assert watch_of(StallMeter(0.5), looks, 30.0) is None
    hang_s = watch_of(StallMeter(0.5), looks * 20, 30.0)
    assert hang_s is not None, "blind"
    assert watch_of(StallMeter(0.5), [(0.5, False)] * 100, 30.0) == pytest.approx(30.5), (
        "one on an idle machine at once"
    )


def test_the_system_tells_who_is_ready() -> None:
    with thread(stand_still) as still, thread(compute) as busy:
        wait_until(lambda: (use := cpu_use(busy)) is not None and use.is_ready and use.ticks > 2)
        wait_until(lambda: (use := cpu_use(still)) is not None and not use.is_ready)


def test_a_look_that_fails_is_logged_once_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[int] = []
    fails = threading.Event()
    num_looks = 0

    def beat() -> float:
        nonlocal num_looks
        num_looks += 1
        if fails.is_set():
            raise OSError(24, "Too many open files")
        return 0.0

    with thread(stand_still) as still:
        fails.set()
        watch = EngineWatch({"engine": Watched(still, beat)}, 0.2, ends.append, interval_s=0.02)
        watch.start()
        wait_until(lambda: num_looks > 20)
        assert ends == []
        fails.clear()
        wait_until(lambda: bool(ends))
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the watch could not look; it tries again"
    ]


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
    wait_until(lambda: cpu_use(still) is None)  # the system forgets a thread a moment after Python has joined it
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
