"""One exposition for Prometheus out of the snapshots of many replicas."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from replicas.metrics.metric_set import FamilySnapshot

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def merge(snapshots: Mapping[str, Sequence[FamilySnapshot]]) -> bytes:
    """Prometheus text of every replica's families, each sample with the label replica=<key of its snapshot>.

    A family that two replicas know by different types (during an upgrade) keeps the type seen first; samples of the
    other are left out, with a log line. So is what is not a snapshot: one replica must not fail the scrape of all.
    Takes milliseconds a replica: call it off the event loop.
    """
    return generate_latest(_Families(_merged(snapshots)))


class _Families(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families.values())


def _merged(snapshots: Mapping[str, Sequence[FamilySnapshot]]) -> dict[str, Metric]:
    families: dict[str, Metric] = {}
    for replica, snapshot in snapshots.items():
        for family in snapshot:
            try:
                _add(families, family, replica)
            except Exception as error:  # whatever a replica of another version may have sent
                logger.warning("metrics: left out a family of replica %s: %r", replica, error)
    return families


def _add(families: dict[str, Metric], family: FamilySnapshot, replica: str) -> None:
    """Add one replica's samples; raises before it has changed anything."""
    name = family["name"]
    samples = [
        (name + suffix, {**{str(key): str(value) for key, value in labels.items()}, "replica": replica}, float(amount))
        for suffix, labels, amount in family["samples"]
    ]
    metric = families.get(name) or Metric(name, family["help"], family["type"])
    if metric.type != family["type"]:
        raise ValueError(f"{name} is a {family['type']} there and a {metric.type} elsewhere")
    families[name] = metric
    for sample_name, labels, amount in samples:
        metric.add_sample(sample_name, labels, amount)
