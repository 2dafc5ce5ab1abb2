"""Metrics of a process: the promised series are there, updates cannot raise, labels cannot explode."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable

import pytest

from replicas.kv.pair_rate import Pace, PairRate, PairRates
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.metrics.metric_set import FamilySnapshot
from replicas.metrics.peer_gauge import MAX_PEERS
from replicas.metrics.pool_metrics import BLOCK_STATES, PoolMetrics, metric_buckets


def pool_metrics(pool: str = "decode") -> PoolMetrics:
    return PoolMetrics("model", pool, "1.0", "2.60.0", "cpu", "ucx")


def value(snapshot: list[FamilySnapshot], name: str, suffix: str = "", **labels: str) -> float:
    """The one sample of a family that has these labels, whatever its others."""
    found = [
        amount
        for family in snapshot
        if family["name"] == name
        for sample_suffix, sample_labels, amount in family["samples"]
        if sample_suffix == suffix and labels.items() <= sample_labels.items()
    ]
    assert len(found) == 1, (name, suffix, labels, found)
    return found[0]


def test_every_promised_family_is_there_from_the_start() -> None:
    families = {family["name"]: family for family in pool_metrics().snapshot()}
    counters = ["kv_transfers", "kv_transfer_bytes", "forwarded_tokens", "surplus_tokens", "prefilled_tokens"]
    gauges = ["requests_in_flight", "requests_queued", "kv_cache_usage_ratio", "kv_blocks", "build_info", "model_info"]
    histograms = ["kv_transfer_seconds", "prefill_time_seconds", "queue_time_seconds", "step_seconds"]
    for names, kind in ((counters, "counter"), (gauges, "gauge"), (histograms, "histogram")):
        for name in names:
            family = families[f"splitserve_{name}"]
            assert family["type"] == kind
            assert family["samples"], name
            assert all(labels["model_name"] == "model" for _, labels, _ in family["samples"])
    assert value(pool_metrics().snapshot(), "splitserve_build_info", ray_version="2.60.0", engine="cpu") == 1
    for state in BLOCK_STATES:
        assert value(pool_metrics().snapshot(), "splitserve_kv_blocks", state=state, pool="decode") == 0


def test_a_snapshot_is_plain_data_without_created_series() -> None:
    snapshot = pool_metrics().snapshot()
    assert json.loads(json.dumps(snapshot))[0]["name"] == snapshot[0]["name"]
    assert not [suffix for family in snapshot for suffix, _, _ in family["samples"] if suffix == "_created"]


def test_updates_are_exact() -> None:
    metrics = pool_metrics()
    metrics.kv_transfers.add(result="ready")
    metrics.kv_transfers.add(2, result="lost: deadline")
    metrics.requests_in_flight.add(3)
    metrics.requests_in_flight.add(-1)
    for duration_s in (0.0005, 0.03, 0.03, 700.0):
        metrics.step_time.observe(duration_s)
    metrics.kv_transfer_bytes.count_to(1000)
    metrics.kv_transfer_bytes.count_to(1024)
    metrics.kv_transfer_busy.add(0.5)
    metrics.kv_transfer_time.observe(0.25)
    metrics.kv_transfers_open.set(1, state="quarantined")
    metrics.set_kv_blocks({"free": 60, "active": 30, "leased": 10})
    snapshot = metrics.snapshot()
    assert value(snapshot, "splitserve_kv_transfers", "_total", result="ready", backend="ucx") == 1
    assert value(snapshot, "splitserve_kv_transfers", "_total", result="lost: deadline") == 2
    assert value(snapshot, "splitserve_kv_transfer_bytes", "_total") == 1024
    assert value(snapshot, "splitserve_kv_transfer_busy_seconds", "_total") == 0.5
    assert value(snapshot, "splitserve_kv_transfer_seconds", "_sum") == 0.25
    assert value(snapshot, "splitserve_kv_transfers_open", state="quarantined") == 1
    assert value(snapshot, "splitserve_requests_in_flight", pool="decode") == 2
    assert value(snapshot, "splitserve_step_seconds", "_count") == 4
    assert value(snapshot, "splitserve_step_seconds", "_sum") == 0.0005 + 0.03 + 0.03 + 700.0
    assert value(snapshot, "splitserve_step_seconds", "_bucket", le="0.02") == 1
    assert value(snapshot, "splitserve_step_seconds", "_bucket", le="0.03") == 3
    assert value(snapshot, "splitserve_step_seconds", "_bucket", le="+Inf") == 4
    assert value(snapshot, "splitserve_kv_cache_usage_ratio") == pytest.approx(0.4)
    assert value(snapshot, "splitserve_kv_blocks", state="reserved") == 0


def test_count_to_follows_a_total_kept_elsewhere() -> None:
    metrics = pool_metrics()
    for total in (5, 5, 9, 100):
        metrics.forwarded_tokens.count_to(total)
        metrics.kv_transfer_errors.count_to(total, kind="read")
    metrics.kv_transfer_errors.count_to(7, kind="poll")
    snapshot = metrics.snapshot()
    assert value(snapshot, "splitserve_forwarded_tokens", "_total") == 100
    assert value(snapshot, "splitserve_kv_transfer_errors", "_total", kind="read") == 100
    assert value(snapshot, "splitserve_kv_transfer_errors", "_total", kind="poll") == 7


def test_wrong_updates_never_raise_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = pool_metrics()
    wrong: list[Callable[[], None]] = [
        lambda: metrics.forwarded_tokens.add(-1),  # duplicate ids and abort races end in such calls
        lambda: metrics.forwarded_tokens.add(math.nan),
        lambda: metrics.forwarded_tokens.set(1),
        lambda: metrics.forwarded_tokens.observe(1),
        lambda: metrics.forwarded_tokens.add(user="alice"),
        lambda: metrics.kv_transfer_errors.add(),
        lambda: metrics.step_time.observe(math.inf),
        lambda: metrics.step_time.observe("fast"),  # type: ignore[arg-type]
        lambda: metrics.step_time.add(1),
        lambda: metrics.requests_queued.set(None),  # type: ignore[arg-type]
        lambda: metrics.forwarded_tokens.count_to("many"),  # type: ignore[arg-type]
    ]
    for call in wrong:
        call()
        call()
    snapshot = metrics.snapshot()
    errors = value(snapshot, "splitserve_metric_errors", "_total", pool="decode")
    assert errors == len(wrong) * 2
    assert value(snapshot, "splitserve_forwarded_tokens", "_total") == 0
    assert value(snapshot, "splitserve_step_seconds", "_count") == 0
    assert len(caplog.records) == 4, "one line for each family"


def test_a_broken_registry_gives_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = pool_metrics()

    def broken() -> list[object]:
        raise RuntimeError("collector")

    monkeypatch.setattr(metrics._registry, "collect", broken)
    assert metrics.snapshot() == []


def test_unknown_label_values_become_one_series() -> None:
    metrics = pool_metrics()
    before = len([sample for family in metrics.snapshot() for sample in family["samples"]])
    metrics.kv_transfers.add(result=["unhashable"])  # type: ignore[arg-type]
    for number in range(999):
        metrics.kv_transfers.add(result=f"invented-{number}")
    snapshot = metrics.snapshot()
    assert len([sample for family in snapshot for sample in family["samples"]]) == before + 1
    assert value(snapshot, "splitserve_kv_transfers", "_total", result="other") == 1000


def test_two_instances_share_nothing() -> None:
    first, second = pool_metrics(), pool_metrics("prefill")
    first.prefilled_tokens.add(10)
    assert value(second.snapshot(), "splitserve_prefilled_tokens", "_total", pool="prefill") == 0


def test_updates_from_threads_are_all_counted() -> None:
    metrics = pool_metrics()

    def work() -> None:
        for _ in range(2000):
            metrics.forwarded_tokens.add()
            metrics.step_time.observe(0.01)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = metrics.snapshot()
    assert value(snapshot, "splitserve_forwarded_tokens", "_total") == 8000
    assert value(snapshot, "splitserve_step_seconds", "_count") == 8000


def test_buckets_rise() -> None:
    tables = {name: bounds for name, bounds in vars(metric_buckets).items() if isinstance(bounds, tuple)}
    assert len(tables) == 8
    for name, bounds in tables.items():
        assert list(bounds) == sorted(set(bounds)), name
    assert metric_buckets.TOKENS[:4] == (1, 2, 5, 10)
    assert metric_buckets.TOKENS[-1] == 500_000


def pairs(metrics: PoolMetrics) -> dict[str, float]:
    (family,) = (f for f in metrics.snapshot() if f["name"] == "splitserve_kv_transfer_rate_bytes_per_second")
    return {labels["peer"]: value for _, labels, value in family["samples"]}


def test_pairs_are_series_while_their_peers_live_and_only_so_many() -> None:
    metrics = pool_metrics()
    assert pairs(metrics) == {}
    metrics.kv_rate.replace({"p1": 1e9, "p2": 2e9})
    assert pairs(metrics) == {"p1": 1e9, "p2": 2e9}
    metrics.kv_rate.replace({"p2": 3e9})
    assert pairs(metrics) == {"p2": 3e9}
    metrics.kv_rate.replace({f"p{number}": float(number) for number in range(5_000)})
    assert pairs(metrics) == {f"p{number}": float(number) for number in range(MAX_PEERS)}


def test_of_thousands_of_pairs_the_slowest_are_shown_and_all_are_counted() -> None:
    metrics = pool_metrics()
    rates = PairRates()
    for number in range(3_000):
        rates.measured(f"a{number}", PairRate(f"p{number}", 1e6 * (3_000 - number), 0.001))
    EngineMetrics(metrics)._set_pairs(rates.all().values())
    assert pairs(metrics) == {f"p{number}": 1e6 * (3_000 - number) for number in range(2_999, 2_999 - MAX_PEERS, -1)}
    by_pace = {pace: value(metrics.snapshot(), "splitserve_kv_transfer_pairs", pace=pace) for pace in Pace}
    assert by_pace == {Pace.TCP: 1499, Pace.NETWORK: 1501, Pace.DEVICE: 0}
    slowest = rates.slowest()
    assert slowest is not None
    assert slowest.replica_id == "p2999"
    for number in range(3_000):
        rates.forget(f"a{number}")
    EngineMetrics(metrics)._set_pairs(rates.all().values())
    assert pairs(metrics) == {}
    assert value(metrics.snapshot(), "splitserve_kv_transfer_pairs", pace="tcp") == 0
