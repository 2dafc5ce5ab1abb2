"""The terminal of `splitserve serve`: our own sentences, steps, and the lines of replicas that are shown."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from cluster.terminal.replica_line import ReplicaLine
from cluster.terminal.steps import PREFIX, Steps

_ALWAYS_SHOWN = frozenset({"access", "throughput"})
# Of a single request: its neighbours, which met with the same, say the same.
_OF_ONE = frozenset({"generation", "request_id", "attempt", "num_waiting"})
# A line that comes again within this time is in the file only.
_QUIET_S = 10.0
_MOST_REMEMBERED = 256


class Terminal:
    """Any thread may use it. A terminal that has gone stops no server."""

    def __init__(self, is_json: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """is_json: every line but the block at the start is for log collectors, and there are no rows."""
        self._is_json = is_json
        self._out, self._err = out, err
        self.steps_of_start: Steps | None = None  # while rows are shown
        self._shown_s: dict[str, float] = {}

    def say(self, message: str, event: str = "serve") -> None:
        """A sentence of the command itself."""
        if self._is_json:
            self._line(_own_line(message, event).as_json(""))
        else:
            self._line(f"{PREFIX}{message}")

    def show(self, line: ReplicaLine, process: str) -> None:
        """A replica's. What was shown a moment ago, of whichever replica or request, is not shown again."""
        if line.event not in _ALWAYS_SHOWN:
            key = str((line.level, line.message, [item for item in line.fields.items() if item[0] not in _OF_ONE]))
            now_s = time.monotonic()
            if now_s - self._shown_s.get(key, -_QUIET_S) < _QUIET_S:
                return
            if len(self._shown_s) >= _MOST_REMEMBERED:
                self._shown_s.clear()
            self._shown_s[key] = now_s
        self._line(line.as_json(process) if self._is_json else line.as_text(process))

    def begin_steps(self) -> None:
        """From now on the steps of a start are shown, until `end_steps`."""
        if not self._is_json:
            self.steps_of_start = Steps(self._err)

    def end_steps(self) -> None:
        steps, self.steps_of_start = self.steps_of_start, None
        if steps is not None:
            steps.close()

    def block(self, text: str) -> None:
        """Several lines on stdout, for people."""
        out = self._out or sys.stdout
        out.write(f"{text}\n")
        out.flush()

    def _line(self, line: str) -> None:
        try:
            if (steps := self.steps_of_start) is not None:
                steps.say(line)
            else:
                err = self._err or sys.stderr
                err.write(f"{line}\n")
                err.flush()
        except (OSError, ValueError):
            return


def _own_line(message: str, event: str) -> ReplicaLine:
    return ReplicaLine(time.time(), "INFO", event, message)
