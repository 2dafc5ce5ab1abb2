"""Steps that take a while, shown as they go on: rows that move in a terminal, plain lines everywhere else.

with Steps() as steps, steps.step("downloading model.safetensors", total=num_bytes, unit="bytes") as step:
    step.advance(len(piece))
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Without a terminal: a step that goes on says so that often.
_LINE_PERIOD_S = 10.0
PREFIX = "splitserve: "


class Steps:
    """Any thread may use it. Rows move from the first step on until `close`; lines in between go through `say`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """stream: stderr if not given. Rows move only if it is a terminal: no control character gets into a file."""
        self.stream = sys.stderr if stream is None else stream
        self.clock = clock
        self.is_lively = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rows: Progress | None = None
        self._closing = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, name: str, total: int | None = None, unit: str = "") -> Step:
        """A step that its caller ends. total: how much there is to do, if that is known, in `unit`; "bytes" are shown
        in MB."""
        with self._closing:  # who comes behind `close` on another thread begins no rows: nobody would stop them
            if self.is_lively and self._rows is None and not self._is_closed:
                self._rows = _rows(self.stream)
                self._rows.start()
            rows = self._rows
        row = None if rows is None else rows.add_task(name, total=None, amount="")
        return Step(self, name, total, unit, rows, row)

    @contextmanager
    def step(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Step]:
        """A step that ends with the block; what the block raises is told by whoever catches it."""
        step = self.begin(name, total, unit)
        try:
            yield step
        except BaseException:
            step.failed()
            raise
        step.done()

    def say(self, line: str) -> None:
        """A line by itself, above the rows."""
        if (rows := self._rows) is not None:
            rows.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self.stream.write(f"{line}\n")
            self.stream.flush()

    def close(self) -> None:
        """The rows stay as they are, and move no more. Steps that are begun later are lines."""
        with self._closing:
            self._is_closed = True
            if self._rows is not None:
                self._rows.stop()
                self._rows = None


class Step:
    """One of them: `Steps.begin` makes it."""

    def __init__(
        self, steps: Steps, name: str, total: int | None, unit: str, rows: Progress | None, row: TaskID | None
    ) -> None:
        self._steps, self._name, self._total, self._unit = steps, name, total, unit
        self._rows, self._row = rows, row
        self._count = 0
        self._begun_s = self._told_s = steps.clock()

    def advance(self, count: int = 1) -> None:
        """So much more has been done."""
        self.reached(self._count + count)

    def reached(self, count: int) -> None:
        """So much has been done in all."""
        self._count = count
        if self._rows is not None and self._row is not None:
            self._rows.update(self._row, amount=self._amount())
        elif self._steps.clock() - self._told_s >= _LINE_PERIOD_S:
            self._told_s = self._steps.clock()
            self._steps.say(f"{PREFIX}{self._name}: {self._amount()}")

    def turns_to(self, name: str, total: int | None = None, unit: str = "") -> None:
        """It is about something else from now on."""
        self._name, self._total, self._unit, self._count = name, total, unit, 0
        self._told_s = self._steps.clock()
        if self._rows is not None and self._row is not None:
            self._rows.update(self._row, description=name, amount="")

    def done(self, name: str | None = None) -> None:
        """It has come to its end. name: what is shown of it from now on."""
        shown = self._name if name is None else name
        if self._rows is not None and self._row is not None:
            self._rows.update(self._row, description=shown, amount="", total=1, completed=1)
        else:
            self.tell(f"{shown} ({self._steps.clock() - self._begun_s:.1f} s)")

    def tell(self, line: str) -> None:
        """What a moving row shows anyhow: said only where there is none."""
        if self._rows is None:
            self._steps.say(f"{PREFIX}{line}")

    def failed(self) -> None:
        """It has come to no good end."""
        if self._rows is not None and self._row is not None:
            self._rows.update(self._row, description=f"{self._name}: failed", amount="")
            self._rows.stop_task(self._row)

    def _amount(self) -> str:
        if self._unit == "bytes":
            done, total, unit = f"{self._count / 1e6:,.0f}", f"{(self._total or 0) / 1e6:,.0f}", " MB"
        else:
            done, total, unit = f"{self._count:,}", f"{self._total or 0:,}", f" {self._unit}" if self._unit else ""
        if not self._total:
            return f"{done}{unit}"
        return f"{done} of {total}{unit}, {100 * self._count // self._total} %"


def _rows(stream: TextIO) -> Progress:
    # Imported here: what runs without a terminal has no use for it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    is_unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return Progress(
        SpinnerColumn("line", finished_text="✓" if is_unicode else "+"),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        console=Console(file=stream, force_terminal=True),
        redirect_stdout=False,
        redirect_stderr=False,
    )
