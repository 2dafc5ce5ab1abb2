"""Steps of a replica's start in its log, so that whoever reads it can show them as they go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EVENT = "start_step"
_PERIOD_S = 1.0


class StartStep:
    """One that has begun."""

    def __init__(self, name: str, total: int | None, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._count = 0
        self._begun_s = self._told_s = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """So much more has been done. A log line a second at most."""
        self._count += count
        if time.monotonic() - self._told_s >= _PERIOD_S:
            self._told_s = time.monotonic()
            self._log("running", done=self._count)

    def begin(self) -> None:
        self._log("begun")

    def end(self) -> None:
        self._log("done", seconds=round(time.monotonic() - self._begun_s, 1))

    def _log(self, state: str, **fields: object) -> None:
        amount: dict[str, object] = {} if self._total is None else {"total": self._total, "unit": self._unit}
        logger.info("%s", self._name, extra={"event": EVENT, "state": state, **fields, **amount})


@contextmanager
def start_step(name: str, total: int | None = None, unit: str = "") -> Iterator[StartStep]:
    """Logs its begin and its end. total: how much there is to do in it, if that is known, in `unit`."""
    step = StartStep(name, total, unit)
    step.begin()
    yield step
    step.end()
