"""A gauge with one series for each peer, which come and go: those that have gone leave no series behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

MAX_PEERS = 32  # of one replica: in a pool of hundreds every pair would be a series


class PeerGauge:
    """One thread replaces the values, any may collect."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._values: dict[str, float] = {}
        registry.register(self)

    def replace(self, values: Mapping[str, float]) -> None:
        """By peer; of more than MAX_PEERS the first. Mutates."""
        self._values = dict(list(values.items())[:MAX_PEERS])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """prometheus_client's interface of a collector."""
        family = GaugeMetricFamily(self._name, self._text, labels=[*self._labels, "peer"])
        for peer, value in self._values.items():
            family.add_metric([*self._labels.values(), peer], value)
        yield family
