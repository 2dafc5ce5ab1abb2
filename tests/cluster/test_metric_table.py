"""The table of metrics is what the processes expose, and nothing that clients send makes it grow."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.metric_table import PREFIX, MetricRow, metric_table
from cluster.monitoring.metrics_merge import merge
from replicas.metrics.metric_set import FamilySnapshot
from replicas.metrics.pool_metrics import PoolMetrics
from tests.cluster.api_client import CHAT, TEXT
from tests.cluster.fake_ingress import LENGTH, FakeIngress, ScriptedSource, text

ROWS = {row.name: row for row in metric_table()}


def snapshots(num_each: int = 1) -> dict[str, list[FamilySnapshot]]:
    """As many ingress, prefill and decode replicas of each kind."""
    found = {f"ingress-{i}": IngressMetrics("model", "1.0", "2.60.0").snapshot() for i in range(num_each)}
    for pool in ("prefill", "decode"):
        for i in range(num_each):
            metrics = PoolMetrics("model", pool, "1.0", "2.60.0", "cpu", "ucx")
            for gauge in (metrics.kv_rate, metrics.kv_latency):
                gauge.replace({f"peer of {pool}": 1.0})
            found[f"{pool}-{i}"] = metrics.snapshot()
    return found


def exposition() -> dict[str, Metric]:
    text_ = merge(snapshots()).decode()
    return {family.name: family for family in text_string_to_metric_families(text_)}


def test_the_table_names_every_family_once_and_no_other() -> None:
    assert len(ROWS) == len(list(metric_table()))
    assert ROWS.keys() == exposition().keys()


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_type_labels_values_and_buckets_are_those_of_the_table(row: MetricRow) -> None:
    family = exposition()[row.name]
    assert family.type == row.type
    kinds = {sample.labels["replica"].split("-")[0] for sample in family.samples}
    assert kinds == set(row.of)
    for sample in family.samples:
        own = {"model_name", "replica"} | ({"le"} if sample.name.endswith("_bucket") else set())
        assert sample.labels.keys() - own == row.labels.keys(), sample
    for label, values in row.labels.items():
        if values is not None:
            assert {sample.labels[label] for sample in family.samples} == set(values)
        else:
            assert len(
                {(sample.labels["replica"].split("-")[0], sample.labels[label]) for sample in family.samples}
            ) == (len(row.of))
    bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
    assert bounds == ({*row.buckets, float("inf")} if row.buckets else set())


def test_names_say_their_units() -> None:
    for row in ROWS.values():
        assert re.fullmatch(PREFIX + "[a-z0-9_]+", row.name)
        assert not row.name.endswith(("_total", "_count", "_sum", "_bucket", "_s", "_ms")), row.name
        if row.buckets and not row.name.endswith("_tokens"):
            assert row.name.endswith("_seconds"), row.name


def test_a_scrape_of_fifty_replicas_takes_less_than_a_second_of_cpu() -> None:
    found = {f"{name}-{i}": snapshot for i in range(17) for name, snapshot in snapshots().items()}
    assert len(found) > 50
    best_s = min(_cpu_s(found) for _ in range(6))
    num_series = merge(found).count(b"\n")
    print(f"{len(found)} replicas, {num_series} lines: {best_s * 1e3:.0f} ms of CPU")
    assert best_s < 1.0


def _cpu_s(found: dict[str, list[FamilySnapshot]]) -> float:
    started_s = time.process_time()
    merge(found)
    return time.process_time() - started_s


def test_a_dead_replica_s_series_end_with_it() -> None:
    found = snapshots(2)
    assert b'replica="decode-1"' in merge(found)
    del found["decode-1"]
    after = merge(found)
    assert b'replica="decode-1"' not in after
    assert b'replica="decode-0"' in after


class App:
    """Requests straight into the ASGI app: no client between, so that thousands are cheap."""

    def __init__(self, ingress: FakeIngress) -> None:
        self.ingress = ingress
        self._app = ingress.app()

    async def post(self, path: str, body: dict[str, Any], method: str = "POST") -> int:
        raw, statuses = json.dumps(body).encode(), []
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[func-returns-value]

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-type", b"application/json"), (b"host", b"h")]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app({**scope, "headers": headers, "http_version": "1.1", "root_path": ""}, receive, send)
        return int(statuses[0])

    def num_series(self) -> int:
        return sum(len(family["samples"]) for family in self.ingress.metrics.snapshot())


@pytest.mark.slow
async def test_ten_thousand_random_models_and_urls_make_no_series() -> None:
    app = App(FakeIngress(ScriptedSource(a=text(0, "b", LENGTH))))
    assert await app.post(TEXT, {"prompt": "a", "max_tokens": 1}) == 200
    before = app.num_series()
    for number in range(5_000):
        assert await app.post(TEXT, {"prompt": "a", "model": f"model-{number}"}) == 404
        assert await app.post(f"/v1/{number}/completions", {}, "GET") == 404
    assert app.num_series() == before
    assert app.ingress.samples("splitserve_requests", outcome="client_error") == 5_000


async def test_no_metric_can_stop_serving(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every single update fails, the count of failures included: requests are answered, streamed ones too."""
    ingress = FakeIngress(ScriptedSource(a=text(0, "bcd", LENGTH)))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("metrics")

    for name in ("Counter.inc", "Gauge.inc", "Gauge.set", "Histogram.observe"):
        monkeypatch.setattr(f"prometheus_client.{name}", broken)
    transport = httpx.ASGITransport(app=ingress.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        body = {"prompt": "a", "max_tokens": 3}
        assert (await client.post(TEXT, json=body)).json()["choices"][0]["text"] == "bcd"
        streamed = await client.post(TEXT, json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        assert (await client.post(CHAT, json=chat)).status_code == 200
    failed = [record.message for record in caplog.records if "metrics: an update" in record.message]
    assert len(failed) >= 8
    assert len(set(failed)) == len(failed), "one line for each family"
