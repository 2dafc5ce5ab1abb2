"""Traces: one of each request, phases as spans, off by default, and never in the way."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from cluster.config.root import Config
from cluster.config.tracing import TracingConfig
from cluster.monitoring import otel_tracing
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.otel_tracing import Tracing, open_tracing
from cluster.serving.ingress import Ingress
from tests.cluster.api_client import CHAT, TEXT
from tests.cluster.fake_ingress import MODEL, FakeIngress
from tests.cluster.fake_model import Fault, Phase, Script
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import PATIENT, Rig, running_router

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Exporter(SpanExporter):
    """Keeps what it is given; or raises, or says that it failed."""

    def __init__(self, how: str = "ok") -> None:
        self.how = how
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.how == "raises":
            raise RuntimeError("collector")
        if self.how == "fails":
            return SpanExportResult.FAILURE
        self.spans += spans
        return SpanExportResult.SUCCESS


class Traced:
    """The HTTP app over the real router over fake pools, traced."""

    def __init__(self, rig: Rig, exporter: Exporter, ratio: float) -> None:
        self.exporter = exporter
        self.ingress = FakeIngress(rig.router)
        self.ingress.tracing = Tracing(TracingConfig(sample_ratio=ratio), MODEL, self.ingress.metrics, exporter)
        transport = httpx.ASGITransport(app=self.ingress.app(), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://x")

    async def post(self, path: str = TEXT, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "abc"}]
        body = {"max_tokens": 4, **({"messages": messages} if path == CHAT else {"prompt": "abc"}), **fields}
        return await self.http.post(path, json=body, headers=headers)

    async def spans(self) -> dict[str, list[ReadableSpan]]:
        """By name, once all calls have been told."""
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert self.ingress.tracing is not None
        await asyncio.to_thread(self.ingress.tracing.stop)
        by_name: defaultdict[str, list[ReadableSpan]] = defaultdict(list)
        for span in self.exporter.spans:
            by_name[span.name].append(span)
        return dict(by_name)


@asynccontextmanager
async def traced(
    script: Script | None = None, how: str = "ok", ratio: float = 1.0, **router: Any
) -> AsyncIterator[Traced]:
    async with running_router(FakeCluster(), **{**PATIENT, **router}) as rig:
        if script is not None:
            rig.cluster.script = lambda _: script
        found = Traced(rig, Exporter(how), ratio)
        async with found.http:
            yield found


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


SLOW = Script(admit_s=0.05, prefill_s=0.04, transfer_s=0.03, token_s=0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_request_is_one_trace_with_its_phases(stream: bool) -> None:
    async with traced(SLOW) as system:
        response = await system.post(CHAT, stream=stream)
        assert response.status_code == 200, response.text
        spans = await system.spans()
    assert {name: len(found) for name, found in spans.items()} == {
        "ingress": 1,
        "queue": 2,
        "prefill": 1,
        "transfer": 1,
        "decode": 1,
    }
    (root,) = spans["ingress"]
    every = [span for found in spans.values() for span in found]
    assert {span.context.trace_id for span in every} == {root.context.trace_id}
    for span in every:
        if span is not root:
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
        assert span.start_time <= span.end_time
        assert span.status.status_code is not StatusCode.ERROR
        assert span.start_time >= root.start_time
    assert 0.05 <= seconds(spans["queue"][0]) < seconds(root)
    assert seconds(spans["prefill"][0]) == pytest.approx(0.04, abs=1e-3)
    assert seconds(spans["transfer"][0]) == pytest.approx(0.03, abs=1e-3)
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["splitserve.outcome"] == "ok"
    assert [event.name for event in root.events] == ["first token"]
    assert dict(spans["decode"][0].attributes or {})["splitserve.decode_replica"] == "decode-0"
    assert dict(spans["prefill"][0].attributes or {})["splitserve.prefill_replica"] == "prefill-0"


async def test_the_client_s_trace_goes_on() -> None:
    async with traced() as system:
        await system.post(headers={"traceparent": PARENT})
        await system.post(headers={"traceparent": "nonsense"})
        first, second = (await system.spans())["ingress"]
    assert f"{first.context.trace_id:032x}" == PARENT.split("-")[1]
    assert first.parent is not None
    assert f"{first.parent.span_id:016x}" == PARENT.split("-")[2]
    assert second.parent is None


async def test_sampling_asks_the_client_first() -> None:
    async with traced(ratio=0.0) as system:
        assert (await system.post()).status_code == 200
        await system.post(headers={"traceparent": PARENT})
        await system.post(headers={"traceparent": PARENT[:-1] + "0"})
        spans = await system.spans()
    assert len(spans["ingress"]) == 1


async def test_a_retry_is_another_attempt_in_the_same_trace() -> None:
    async with running_router(FakeCluster(), **PATIENT) as rig:
        rig.cluster.fail(Fault(Phase.DECODE, "raise"))
        system = Traced(rig, Exporter(), 1.0)
        async with system.http:
            assert (await system.post()).status_code == 200
            spans = await system.spans()
    assert len(spans["ingress"]) == 1
    failed = [span for span in spans["decode"] if span.status.status_code is StatusCode.ERROR]
    assert [dict(span.attributes or {})["error.type"] for span in failed] == ["RuntimeError"]
    assert {dict(span.attributes or {})["splitserve.attempt"] for span in spans["prefill"]} == {1, 2}


async def test_an_error_is_one_in_the_trace() -> None:
    async with traced(Script(Fault(Phase.QUEUE, "hang")), queue_s=0.05) as system:
        assert (await system.post()).status_code == 429
        spans = await system.spans()
    (root,), (queue,) = spans["ingress"], spans["queue"]
    assert root.status.status_code is StatusCode.ERROR
    assert dict(root.attributes or {})["error.type"] == "rejected"
    assert seconds(queue) >= 0.05
    assert queue.status.status_code is StatusCode.ERROR


async def test_one_token_has_no_transfer_and_no_decode() -> None:
    async with traced() as system:
        assert (await system.post(max_tokens=1)).status_code == 200
        assert (await system.spans()).keys() == {"ingress", "queue", "prefill"}


@pytest.mark.parametrize("how", ["raises", "fails"])
async def test_a_collector_that_fails_harms_nobody_and_is_counted(how: str) -> None:
    async with traced(how=how) as system:
        assert (await system.post()).status_code == 200
        assert await system.spans() == {}
        ended = system.ingress.samples("splitserve_trace_spans", result="ended")
        assert ended == system.ingress.samples("splitserve_trace_spans", result="failed") == 5


async def test_a_tracer_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced() as system:

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("tracer")

        monkeypatch.setattr("cluster.monitoring.otel_spans.SpanMaker.make", broken)
        monkeypatch.setattr("cluster.monitoring.otel_spans.SpanMaker.end", broken)
        assert (await system.post(stream=True)).text.endswith("data: [DONE]\n\n")
        monkeypatch.setattr("opentelemetry.sdk.trace.Tracer.start_span", broken)
        assert (await system.post()).status_code == 200


def test_it_is_off_by_default() -> None:
    assert open_tracing(TracingConfig(), MODEL, IngressMetrics(MODEL, "1", "2")) is None
    assert TracingConfig(endpoint="http://collector:4318/").traces_url == "http://collector:4318/v1/traces"


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://c:4317", "http://", "http://c/?x=1", ""])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="base URL"):
        Config.model_validate({"pools": json.loads("{}"), "tracing": {"endpoint": endpoint}})


def test_without_its_packages_a_file_that_asks_for_traces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"endpoint": "http://collector:4318"}
    assert TracingConfig.model_validate(values, context={"base_dir": tmp_path}).endpoint
    monkeypatch.setattr("cluster.config.tracing.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install '\.\[otel\]'"):
        TracingConfig.model_validate(values, context={"base_dir": tmp_path})


async def test_spans_reach_a_collector_over_http() -> None:
    """OTLP itself: what a collector receives decodes to the spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[bytes, bytes]] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        bodies.append((head, await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(collect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    metrics = IngressMetrics(MODEL, "1", "2")
    # What is not delivered in time is dropped, and this machine may stand still for longer than usual.
    config = TracingConfig(endpoint=f"http://127.0.0.1:{port}", export_timeout_s=120.0)
    tracing = open_tracing(config, MODEL, metrics)
    assert tracing is not None
    tracing.request(TEXT, {}).over("ok", ["stop"], 3)
    await asyncio.to_thread(tracing.stop)
    server.close()
    ((head, body),) = bodies
    assert head.startswith(b"POST /v1/traces ")
    raw = gzip.decompress(body) if b"content-encoding: gzip" in head.lower() else body
    (resource,) = ExportTraceServiceRequest.FromString(raw).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["ingress"]


async def test_an_ingress_sends_its_last_spans_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span waits to be sent with others, here for an hour; by Serve's hook for the end it is sent at once."""
    monkeypatch.setattr(otel_tracing, "_EXPORT_INTERVAL_MS", 3_600_000)
    exporter = Exporter()
    ingress = object.__new__(Ingress)  # the rest of it needs Ray
    metrics = IngressMetrics(MODEL, "1", "2")
    ingress.tracing = Tracing(TracingConfig(), MODEL, metrics, exporter)
    ingress.tracing.request(TEXT, {}).over("ok", ["stop"], 1)
    assert not exporter.spans
    assert inspect.iscoroutinefunction(Ingress.__del__), "Serve awaits no other"
    await ingress.__del__()
    assert [span.name for span in exporter.spans] == ["ingress"]
    await ingress.__del__()
