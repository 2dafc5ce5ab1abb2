"""What goes wrong in moving KV: counted by kind, and logged without flooding the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

_LOG_EVERY_S = 1.0  # of one kind of error: a broken transport fails at every poll

logger = logging.getLogger(__name__)


class ErrorCounts:
    """For one thread; counts may be read from others. now_s: monotonic seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._now_s = now_s
        self._logged_s: dict[str, float] = {}

    def report(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        now_s = self._now_s()
        if now_s - self._logged_s.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[kind] = now_s
            logger.warning("KV transfer (%s, %d so far): %s", kind, self.counts[kind], text)

    def confined(self, kind: str, call: Callable[[], None]) -> None:
        """Call foreign code whose failure must not change what follows."""
        try:
            call()
        except Exception as error:
            self.report(kind, repr(error))
