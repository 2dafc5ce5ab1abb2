"""Traces by OpenTelemetry: one of each request, whose spans are its phases.

    ingress  |------------------------------------------------------------------|   the HTTP request
    queue    |--| for memory on decode       |-| for prefill's next step
    prefill                                    |--------|
    transfer                                             |----| KV moves
    decode                                                    |-----------------|

The replicas know nothing of it: their replies say how long each phase took, and the spans are put together here, each
ending when the ingress heard of its end. So no clocks are compared, and a span is late by a message's way, a few
milliseconds. Attributes are named as OpenTelemetry's GenAI conventions have them (status: development), ours
`splitserve.`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.monitoring.request_trace import RequestTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from cluster.config.tracing import TracingConfig
    from cluster.monitoring.ingress_metrics import IngressMetrics

logger = logging.getLogger(__name__)

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
# Spans wait so long to be sent together; a replica that is stopped hard loses no more than these.
_EXPORT_INTERVAL_MS = 1_000
_MAX_WAITING_SPANS = 8_192


def open_tracing(config: TracingConfig, model_name: str, metrics: IngressMetrics) -> Tracing | None:
    """None when it is off. Raises ModuleNotFoundError without the packages of the extra `otel`."""
    if config.traces_url is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=config.traces_url, timeout=config.export_timeout_s)
    return Tracing(config, model_name, metrics, exporter)


class Tracing:
    """One per ingress replica. Its exporter has a thread of its own; when that can't keep up, spans are dropped."""

    def __init__(self, config: TracingConfig, model_name: str, metrics: IngressMetrics, exporter: SpanExporter) -> None:
        """exporter: where spans go."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._metrics = metrics
        self._model_name = model_name
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": config.service_name}),
        )
        counting = _counting(exporter, metrics)
        self._provider.add_span_processor(
            BatchSpanProcessor(counting, _MAX_WAITING_SPANS, schedule_delay_millis=_EXPORT_INTERVAL_MS)
        )
        self._tracer = self._provider.get_tracer("splitserve")
        self._propagator = TraceContextTextMapPropagator()

    def request(self, endpoint: str, headers: Mapping[str, str]) -> RequestTrace:
        """A request has come; its `traceparent` header, if it is valid, says whose part it is. Raises nothing."""
        from opentelemetry.trace import SpanKind

        from cluster.monitoring.otel_spans import OtelRequestTrace, SpanMaker

        try:
            parent = self._propagator.extract({name: headers[name] for name in _PARENT_HEADERS if name in headers})
            operation = _OPERATIONS.get(endpoint, endpoint)
            attributes = {
                "http.request.method": "POST",
                "http.route": endpoint,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "splitserve",
                "gen_ai.request.model": self._model_name,
            }
            maker = SpanMaker(self._tracer, self._metrics)
            span = self._tracer.start_span(
                "ingress", parent, SpanKind.SERVER, attributes, start_time=maker.wall_ns(time.monotonic())
            )
            return OtelRequestTrace(maker, span) if span.is_recording() else RequestTrace()
        except Exception:
            logger.exception("a trace could not be begun", extra={"event": "trace_failed"})
            return RequestTrace()

    def stop(self) -> None:
        """Send what waits. Blocks up to the time of an export."""
        self._provider.shutdown()


_PARENT_HEADERS = ("traceparent", "tracestate")


def _counting(exporter: SpanExporter, metrics: IngressMetrics) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class CountingExporter(SpanExporter):
        """Counts what became of spans."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                result = exporter.export(spans)
            finally:
                outcome = "exported" if result is SpanExportResult.SUCCESS else "failed"
                metrics.trace_spans.add(len(spans), result=outcome)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return CountingExporter()
