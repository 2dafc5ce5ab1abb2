"""Tells an engine that stands still from one that works or waits, on a thread of its own.

A long step and a hung one look alike from outside, as the loop does not come round in either. So a thread counts as
alive when its loop has come round or it has used CPU time since it was last looked at. A thread that computes for ever
is not noticed here: `check_health` bounds the length of a step.

A machine without CPU to give looks like a hang too. Seen in a process of the lowest priority on 2 cores that 30 others
wanted: this watch, which waits 0.5 s between looks, was late by 5 to 8 s half of the time, by 29 s once; and a thread
that only waits in a queue, 20 ms at a time, had neither come round nor got a tick of CPU time for three looks in a row:
3 s by a clock that counts each look for a second, 0.1 s at most as it is counted now.

So what is counted is not time on the clock. What the system says is ready to run stands still through no fault of its
own: it does not count. And the later the watch itself is, the less a look counts: at twice its interval half of one. A
thread that hangs is still found on such a machine, only later: in those looks one counted 1 s in 90, so that there it
is the silence which `check_health` allows that ends first.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
_EXIT_CODE = 70  # an internal software error, by sysexits.h


@dataclass(frozen=True, slots=True)
class Progress:
    """beat: anything that is another value whenever the loop comes round. cpu_ticks: the thread's CPU time so far.
    is_ready: it runs or waits for a CPU to do so; no progress by itself."""

    beat: float
    cpu_ticks: int
    is_ready: bool = field(default=False, compare=False)


class StallMeter:
    """For how long one thread has made no progress. Pure: time is an argument, monotonic seconds.

    A look counts for interval_s at most, and for less the later it is: a process that was stopped as a whole, or gets
    no CPU, goes on with about the silence that it had.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last: tuple[float, Progress] | None = None
        self.stalled_s = 0.0

    def look(self, now_s: float, progress: Progress) -> float:
        """What it is now: 0.0 when there was progress since the last look. Mutates."""
        if self._last is None or self._last[1] != progress:
            self.stalled_s = 0.0
        elif not progress.is_ready:
            elapsed_s = now_s - self._last[0]
            self.stalled_s += min(elapsed_s, self._interval_s**2 / max(elapsed_s, self._interval_s))
        self._last = now_s, progress
        return self.stalled_s


@dataclass(frozen=True, slots=True)
class Watched:
    """A thread, and its beat."""

    thread: threading.Thread
    beat: Callable[[], float]

    def progress(self) -> Progress | None:
        """None once the thread has ended: that is no stall, and `check_health` tells of it."""
        use = cpu_use(self.thread)
        return None if use is None else Progress(self.beat(), use.ticks, use.is_ready)


class EngineWatch:
    """Watches the threads of one engine. After restart_after_s without progress of one, it ends the process."""

    def __init__(
        self,
        threads: Mapping[str, Watched],
        restart_after_s: float,
        end_process: Callable[[int], object] = os._exit,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """end_process: called on the watch's thread; by default nothing runs after it, as the engine can't be ended."""
        self._watched = {name: (watched, StallMeter(interval_s)) for name, watched in threads.items()}
        self._restart_after_s, self._end_process, self._interval_s = restart_after_s, end_process, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Before the threads are ended. Does not block."""
        self._stop.set()

    @property
    def stalled_s(self) -> float:
        """The longest that one of the threads has made no progress now. Any thread."""
        return max((meter.stalled_s for _, meter in self._watched.values()), default=0.0)

    def _run(self) -> None:
        is_failing = False
        while not self._stop.wait(self._interval_s):
            try:
                if self._look():
                    return
                is_failing = False
            except Exception:  # no descriptor is free, for example: nobody is judged by a look that failed
                if not is_failing:
                    logger.exception("the watch could not look; it tries again", extra={"event": "watch_failed"})
                is_failing = True

    def _look(self) -> bool:
        """At each thread. Whether the process was ended."""
        for name, (watched, meter) in self._watched.items():
            progress = watched.progress()
            if progress is None or meter.look(time.monotonic(), progress) < self._restart_after_s:
                continue
            stack = "".join(_stack_of(watched.thread))
            extra = {"event": "engine_frozen", "which": name, "stalled_s": round(meter.stalled_s, 1)}
            logger.critical("the %s thread stands still; this process ends. It was at\n%s", name, stack, extra=extra)
            self._end_process(_EXIT_CODE)
            return True
        return False


class CpuUse(NamedTuple):
    """Of a thread. ticks: its CPU time so far, in hundredths of a second. is_ready: it runs, or waits for a CPU."""

    ticks: int
    is_ready: bool


def cpu_use(thread: threading.Thread) -> CpuUse | None:
    """Of a thread of this process. None when it does not run. Raises OSError when the system does not tell.

    From /proc/self/task (proc(5)): a look at an ended thread fails there, where a clock of it would be undefined.
    """
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return CpuUse(int(fields[11]) + int(fields[12]), fields[0] == "R")  # utime and stime; state


def _stack_of(thread: threading.Thread) -> list[str]:
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.format_stack(frame) if frame is not None else ["(ended)\n"]
