"""A process's metrics: a Prometheus registry of its own, no module globals."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypedDict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from replicas.metrics.guarded_metric import Family, GuardedMetric, LabelValues
from replicas.metrics.peer_gauge import PeerGauge
from replicas.metrics.token_histogram import TokenHistogram

logger = logging.getLogger(__name__)

NO_LABELS: LabelValues = {}
NO_VALUES: Mapping[str, str] = {}


class FamilySnapshot(TypedDict):
    """One metric family as plain data, for a Ray call. A sample: (suffix of its name, labels, value)."""

    name: str
    type: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


class MetricSet:
    """Base of the metrics of an engine replica and of an ingress: what both have, and how families are made.

    Every family carries model_name and its fixed labels. The `replica` label is added where replicas are merged.
    """

    def __init__(self, model_name: str, pool: str, version: str, ray_version: str, engine: str) -> None:
        """engine: what computes: "cpu", "cuda" or "none"."""
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._reported: set[Family | None] = set()
        self.of_pool = {"pool": pool}
        self._errors = self.counter("splitserve_metric_errors", "Updates of metrics that failed", fixed=self.of_pool)
        self.requests_in_flight = self.gauge(
            "splitserve_requests_in_flight", "Requests admitted and not finished", fixed=self.of_pool
        )
        self.requests_queued = self.gauge(
            "splitserve_requests_queued", "Requests waiting for admission", fixed=self.of_pool
        )
        info = self.of_pool | {"version": version, "ray_version": ray_version, "engine": engine}
        self.gauge("splitserve_build_info", "Always 1; the labels say what runs", fixed=info).set(1)

    def counter(
        self, name: str, text: str, labels: LabelValues = NO_LABELS, fixed: Mapping[str, str] = NO_VALUES
    ) -> GuardedMetric:
        """name without _total."""
        return self._guarded(Counter(name, text, self._names(fixed, labels), registry=self._registry), fixed, labels)

    def gauge(
        self, name: str, text: str, labels: LabelValues = NO_LABELS, fixed: Mapping[str, str] = NO_VALUES
    ) -> GuardedMetric:
        return self._guarded(Gauge(name, text, self._names(fixed, labels), registry=self._registry), fixed, labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], fixed: Mapping[str, str] = NO_VALUES
    ) -> GuardedMetric:
        """buckets: upper bounds from replicas.metrics.metric_buckets; +Inf is added."""
        names = self._names(fixed, NO_LABELS)
        return self._guarded(Histogram(name, text, names, registry=self._registry, buckets=buckets), fixed, NO_LABELS)

    def token_histogram(self, name: str, text: str, buckets: Sequence[float]) -> TokenHistogram:
        """Cheap enough for every token; only one thread may observe."""
        return TokenHistogram(name, text, buckets, {"model_name": self._model_name}, self._registry)

    def peer_gauge(self, name: str, text: str, fixed: Mapping[str, str]) -> PeerGauge:
        """By peers that come and go; only one thread may replace its values."""
        return PeerGauge(name, text, {"model_name": self._model_name, **fixed}, self._registry)

    def snapshot(self) -> list[FamilySnapshot]:
        """Every family's present values. Any thread; raises nothing; takes about 1 ms."""
        families: list[FamilySnapshot] = []
        try:
            for family in self._registry.collect():
                samples = [
                    (sample.name.removeprefix(family.name), dict(sample.labels), float(sample.value))
                    for sample in family.samples
                    if not sample.name.endswith("_created")  # OpenMetrics' idea; here a series for every series
                ]
                families.append(
                    {"name": family.name, "type": family.type, "help": family.documentation, "samples": samples}
                )
        except Exception as error:
            self._on_error(None, error)
        return families

    def _names(self, fixed: Mapping[str, str], labels: LabelValues) -> list[str]:
        return ["model_name", *fixed, *labels]

    def _guarded(self, family: Family, fixed: Mapping[str, str], labels: LabelValues) -> GuardedMetric:
        return GuardedMetric(family, [self._model_name, *fixed.values()], labels, self._on_error)

    def _on_error(self, family: Family | None, error: Exception) -> None:
        # Once for each family: a wrong call is made again with every request.
        if family not in self._reported:
            self._reported.add(family)
            logger.error("metrics: an update of %s failed: %r", family, error)
        if not self._errors.is_of(family):  # else counting it would fail again, and again
            self._errors.add()
