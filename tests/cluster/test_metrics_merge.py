"""Many snapshots become one exposition that Prometheus' own parser accepts, with exact values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.monitoring.ingress_metrics import ENDPOINTS, IngressMetrics
from cluster.monitoring.metrics_merge import merge
from replicas.metrics.metric_set import FamilySnapshot
from replicas.metrics.pool_metrics import PoolMetrics


def decode_metrics() -> PoolMetrics:
    return PoolMetrics("model", "decode", "1.0", "2.60.0", "cpu", "ucx")


def parsed(snapshots: Mapping[str, Sequence[FamilySnapshot]]) -> dict[str, Metric]:
    text = merge(snapshots).decode("utf-8")
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family is given once"
    for word in ("HELP", "TYPE"):
        names = re.findall(rf"^# {word} (\S+)", text, re.MULTILINE)
        assert len(set(names)) == len(names)
    return {family.name: family for family in families}


def values(family: Metric, name: str, **labels: str) -> dict[str, float]:
    """replica -> value of the samples of that name with these labels."""
    return {
        sample.labels["replica"]: sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def test_same_families_of_two_replicas_stand_together_with_exact_values() -> None:
    first, second = decode_metrics(), decode_metrics()
    for metrics, count in ((first, 3), (second, 4)):
        for _ in range(count):
            metrics.forwarded_tokens.add(10)
            metrics.step_time.observe(0.1 * count)
            metrics.kv_transfers.add(result="ready")
    families = parsed({"decode-1": first.snapshot(), "decode-2": second.snapshot()})
    tokens = families["splitserve_forwarded_tokens"]
    assert tokens.type == "counter"
    assert values(tokens, "splitserve_forwarded_tokens_total") == {"decode-1": 30, "decode-2": 40}
    steps = families["splitserve_step_seconds"]
    assert values(steps, "splitserve_step_seconds_count") == {"decode-1": 3, "decode-2": 4}
    sums = values(steps, "splitserve_step_seconds_sum")
    assert sums == {"decode-1": sum([0.1 * 3] * 3), "decode-2": sum([0.1 * 4] * 4)}
    transfers = families["splitserve_kv_transfers"]
    assert values(transfers, "splitserve_kv_transfers_total", result="ready") == {"decode-1": 3, "decode-2": 4}


def test_histograms_are_cumulative_and_in_order_up_to_infinity() -> None:
    first, second = decode_metrics(), decode_metrics()
    for number in range(200):
        first.step_time.observe(number / 50)
        second.queue_time.observe(number)
    families = parsed({"a": first.snapshot(), "b": second.snapshot()})
    num_histograms = 0
    for family in families.values():
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        counts = {}
        for sample in family.samples:
            key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                counts[key] = sample.value
        for key, buckets in series.items():
            num_histograms += 1
            bounds = [bound for bound, _ in buckets]
            assert bounds == sorted(set(bounds))
            assert bounds[-1] == float("inf")
            amounts = [amount for _, amount in buckets]
            assert amounts == sorted(amounts)
            assert amounts[-1] == counts[key]
    assert num_histograms == 14


def test_ingress_and_pools_share_families() -> None:
    ingress = IngressMetrics("model", "1.0", "2.60.0")
    ingress.requests_in_flight.set(7)
    decode = decode_metrics()
    decode.requests_in_flight.set(2)
    families = parsed({"ingress-1": ingress.snapshot(), "decode-1": decode.snapshot()})
    in_flight = families["splitserve_requests_in_flight"]
    assert values(in_flight, "splitserve_requests_in_flight") == {"ingress-1": 7, "decode-1": 2}
    assert values(in_flight, "splitserve_requests_in_flight", pool="ingress") == {"ingress-1": 7}


def test_the_router_s_events_and_random_urls() -> None:
    metrics = IngressMetrics("model", "1.0", "2.60.0", policy="pairs")
    metrics.routed("remote")
    metrics.retried("frames")
    metrics.rejected("queue_full")
    num_series = sum(len(family["samples"]) for family in metrics.snapshot())
    for number in range(500):
        metrics.requests.add(endpoint=f"/../{number}", outcome="client_error")
    metrics.requests.add(endpoint=ENDPOINTS[0], outcome="ok")
    families = parsed({"i": metrics.snapshot()})
    assert sum(len(family["samples"]) for family in metrics.snapshot()) == num_series + 1
    decisions = families["splitserve_router_decisions"]
    assert values(decisions, "splitserve_router_decisions_total", policy="pairs", result="remote") == {"i": 1}
    assert values(families["splitserve_retries"], "splitserve_retries_total", stage="frames") == {"i": 1}
    rejections = families["splitserve_request_rejections"]
    assert values(rejections, "splitserve_request_rejections_total", reason="queue_full") == {"i": 1}
    requests = families["splitserve_requests"]
    assert values(requests, "splitserve_requests_total", endpoint="other") == {"i": 500}


def test_labels_are_escaped() -> None:
    nasty = 'quote " backslash \\ newline \n end}'
    metrics = PoolMetrics(nasty, "decode", "1.0", "2.60.0", "cpu", "ucx")
    metrics.forwarded_tokens.add(5)
    families = parsed({nasty: metrics.snapshot()})
    sample = next(s for s in families["splitserve_forwarded_tokens"].samples if s.name.endswith("_total"))
    assert sample.labels["replica"] == nasty
    assert sample.labels["model_name"] == nasty
    assert sample.value == 5


def test_what_does_not_fit_is_left_out_and_harms_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    good = decode_metrics()
    good.forwarded_tokens.add(1)
    bad: list[Any] = [
        {"name": "splitserve_forwarded_tokens", "type": "gauge", "help": "", "samples": [("", {}, 1.0)]},
        {"name": 5, "type": "gauge", "help": "", "samples": []},
        {"name": "splitserve_x", "type": "invented", "help": "", "samples": []},
        {"name": "splitserve_y", "type": "gauge", "help": "", "samples": [("", {}, "many")]},
        {"name": "splitserve_z", "type": "gauge", "help": "", "samples": [(5, {}, 1.0), ("", None, 1.0)]},
        {"type": "gauge"},
        "nonsense",
        {"name": "splitserve_fine", "type": "gauge", "help": "line 1\nline 2", "samples": [("", {}, 2.0)]},
    ]
    families = parsed({"good": good.snapshot(), "bad": bad})
    assert values(families["splitserve_forwarded_tokens"], "splitserve_forwarded_tokens_total") == {"good": 1}
    assert values(families["splitserve_fine"], "splitserve_fine") == {"bad": 2}
    assert not {"splitserve_x", "splitserve_y"} & families.keys()
    assert len(caplog.records) == 7


def test_nothing_merges_to_nothing() -> None:
    assert merge({}) == b""
    assert merge({"silent": []}) == b""
