"""Metrics that nobody reads."""

from __future__ import annotations

from typing import Any


class _NoMetrics:
    """Takes everything and does nothing with it."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *values: Any, **labels: Any) -> None:
        return None


NO_METRICS: Any = _NoMetrics()
