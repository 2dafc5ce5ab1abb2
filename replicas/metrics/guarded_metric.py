"""One metric family whose updates can never raise into the serving path."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from prometheus_client import Counter, Gauge, Histogram

Family = Counter | Gauge | Histogram

# The values each variable label may take. Anything else counts as "other", so that no request can create series.
LabelValues = Mapping[str, Sequence[str]]
OTHER = "other"


class GuardedMetric:
    """One family. Variable labels go by keyword. A wrong update (label, sign, NaN) goes to on_error, and is lost.

    Any thread may update.
    """

    def __init__(
        self,
        family: Family,
        fixed: Sequence[str],
        labels: LabelValues,
        on_error: Callable[[Family, Exception], None],
    ) -> None:
        """fixed: values of the family's first labels; labels: its other labels, in order."""
        self._family = family
        self._fixed = tuple(fixed)
        self._labels = labels
        self._on_error = on_error
        self._count_lock = threading.Lock()
        self._counted: dict[tuple[tuple[str, str], ...], float] = {}
        # The one series of a family without variable labels: found once, as some are updated with every token.
        self._only = None if labels else family.labels(*self._fixed)
        # Every known series exists from the start, at 0: a rate over its first increase would miss it.
        for values in product(*labels.values()):
            self._child(dict(zip(labels, values, strict=True)))

    def is_of(self, family: Family | None) -> bool:
        """Whether this guards that family."""
        return family is self._family

    def add(self, amount: float = 1, **labels: str) -> None:
        """Increase a counter, or change a gauge, by amount."""
        try:
            child = self._child(labels)
            if isinstance(child, Histogram):
                raise TypeError("a histogram is observed")
            child.inc(_finite(amount))
        except Exception as error:
            self._on_error(self._family, error)

    def count_to(self, total: float, **labels: str) -> None:
        """Bring a counter up to a total that somebody else keeps: adds what came since the last call.

        A total below the last one was read before it, on another thread: nothing is new.
        """
        try:
            key = tuple(sorted(labels.items()))
            with self._count_lock:
                increase = total - self._counted.get(key, 0.0)
                if increase <= 0:
                    return
                self._counted[key] = total
        except Exception as error:
            self._on_error(self._family, error)
        else:
            self.add(increase, **labels)

    def set(self, value: float, **labels: str) -> None:
        """Set a gauge."""
        try:
            child = self._child(labels)
            if not isinstance(child, Gauge):
                raise TypeError("only a gauge is set")
            child.set(_finite(value))
        except Exception as error:
            self._on_error(self._family, error)

    def observe(self, value: float, **labels: str) -> None:
        """Record one value of a histogram."""
        try:
            child = self._child(labels)
            if not isinstance(child, Histogram):
                raise TypeError("only a histogram is observed")
            child.observe(_finite(value))
        except Exception as error:
            self._on_error(self._family, error)

    def _child(self, labels: Mapping[str, str]) -> Family:
        if self._only is not None and not labels:
            return self._only
        if labels.keys() != self._labels.keys():
            raise ValueError(f"labels are {sorted(self._labels)}, not {sorted(labels)}")
        values = [labels[name] if labels[name] in allowed else OTHER for name, allowed in self._labels.items()]
        return self._family.labels(*self._fixed, *values)


def _finite(value: float) -> float:
    # One NaN would make a sum NaN for good.
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value
