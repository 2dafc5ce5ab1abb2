"""The per-token histogram says what prometheus_client's own would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from replicas.metrics.metric_buckets import PER_TOKEN_S
from replicas.metrics.token_histogram import TokenHistogram


def test_the_same_text_as_the_clients_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = TokenHistogram("latency_seconds", "Text", PER_TOKEN_S, {"model_name": "m"}, ours)
    labels = ("model_name",)
    slow = Histogram("latency_seconds", "Text", labels, registry=theirs, buckets=PER_TOKEN_S).labels("m")
    rng = random.Random(1)
    values = [0.0, *PER_TOKEN_S, 1e9, *(rng.expovariate(20) for _ in range(2000))]
    for values_so_far in ([], values):
        for value in values_so_far:
            fast.observe(value)
            slow.observe(value)
        assert _samples(ours) == _samples(theirs)


def _samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [(s.name, s.labels, s.value) for family in families for s in family.samples]
    return [sample for sample in samples if not sample[0].endswith("_created")]
