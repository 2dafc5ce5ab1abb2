"""The spans of one request. Only imported where OpenTelemetry is installed and traces are on."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from cluster.monitoring.request_trace import AttemptTrace, RequestTrace
from replicas.messages import CallStatus

if TYPE_CHECKING:
    from cluster.monitoring.ingress_metrics import IngressMetrics
    from cluster.policies.routing_policy import Route
    from replicas.messages import GenerateReply, PrefillReply

logger = logging.getLogger(__name__)

_OUR_FAILURES = ("server_error", "timeout", "rejected")


class SpanMaker(AbstractContextManager[None]):
    """Makes one request's spans out of times on the monotonic clock. As a context it keeps errors from spreading."""

    def __init__(self, tracer: Tracer, metrics: IngressMetrics) -> None:
        self._tracer, self._metrics = tracer, metrics
        # Wall-clock time is asked once: were it set meanwhile, phases would still have their lengths and order.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def wall_ns(self, time_s: float) -> int:
        """Nanoseconds since 1970."""
        return int(time_s * 1e9) + self._offset_ns

    def make(
        self,
        name: str,
        context: Context,
        start_s: float,
        end_s: float,
        attributes: dict[str, AttributeValue],
        error: str | None = None,
    ) -> None:
        """One span that has ended. error: its `error.type`."""
        start_ns, end_ns = self.wall_ns(start_s), self.wall_ns(end_s)
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=start_ns)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        self.end(span, max(start_ns, end_ns))

    def end(self, span: Span, end_ns: int) -> None:
        span.end(end_ns)
        self._metrics.trace_spans.add(result="ended")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            logger.error("a trace failed", exc_info=error, extra={"event": "trace_failed"})
            return True
        return False


class OtelRequestTrace(RequestTrace):
    """The span `ingress`, and what belongs to it."""

    def __init__(self, maker: SpanMaker, span: Span) -> None:
        self._maker, self._span = maker, span
        self._context = set_span_in_context(span)
        self._num_attempts = 0

    def prompt(self, num_tokens: int) -> None:
        with self._maker:
            self._span.set_attribute("gen_ai.usage.input_tokens", num_tokens)

    def first_token(self) -> None:
        with self._maker:
            self._span.add_event("first token", timestamp=self._maker.wall_ns(time.monotonic()))

    def over(self, outcome: str, finish_reasons: list[str], num_tokens: int, num_cached: int = 0) -> None:
        with self._maker:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)
            self._span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            self._span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
            self._span.set_attribute("splitserve.outcome", outcome)
            if outcome != "ok":
                self._span.set_attribute("error.type", outcome)
            if outcome in _OUR_FAILURES:
                self._span.set_status(Status(StatusCode.ERROR))
            self._maker.end(self._span, self._maker.wall_ns(time.monotonic()))

    def attempt(self, route: Route) -> AttemptTrace:
        self._num_attempts += 1
        return OtelAttemptTrace(self._maker, self._context, route, self._num_attempts)


class OtelAttemptTrace(AttemptTrace):
    """The phases of one attempt; those of a later one are numbered so. Times: monotonic, None before the event."""

    def __init__(self, maker: SpanMaker, context: Context, route: Route, number: int) -> None:
        self._maker, self._context, self._route = maker, context, route
        self._attributes: dict[str, AttributeValue] = {
            "splitserve.attempt": number,
            "splitserve.route": route.kind.value,
            "splitserve.decode_replica": route.decode_id,
        }
        if route.prefill_id is not None:
            self._attributes["splitserve.prefill_replica"] = route.prefill_id
        self._opened_s = time.monotonic()
        self._admitted_s: float | None = None
        self._prefilled_s: float | None = None
        self._handed_over_s: float | None = None
        self._is_prefill_all = False  # the first tokens were the last ones, too

    def admitted(self) -> None:
        with self._maker:
            self._admitted_s = time.monotonic()
            self._span("queue", self._opened_s, self._admitted_s, pool="decode")

    def prefilled(self, reply: PrefillReply) -> None:
        with self._maker:
            now_s = self._prefilled_s = time.monotonic()
            began_s = now_s - reply.prefill_s
            self._span("queue", began_s - reply.queue_s, began_s, pool="prefill")
            self._span("prefill", began_s, now_s, pool="prefill")
            firsts = reply.first_tokens
            self._is_prefill_all = bool(firsts) and all(token.finish_reason is not None for token in firsts)

    def handed_over(self) -> None:
        self._handed_over_s = time.monotonic()

    def ended(self, call: asyncio.Task[GenerateReply]) -> None:
        with self._maker:
            now_s = time.monotonic()
            if call.cancelled():
                self._cut_short("cancelled", now_s)
            elif (error := call.exception()) is not None:
                self._cut_short(type(error).__name__, now_s)
            elif (reply := call.result()).status is not CallStatus.OK:
                self._cut_short(reply.status.value, now_s)
            else:
                self._answered(reply, now_s)

    def _answered(self, reply: GenerateReply, now_s: float) -> None:
        began_s = now_s - reply.decode_s
        if reply.prefill_s:
            self._span("prefill", began_s - reply.prefill_s, began_s, pool="decode")
        if reply.transfer_s:
            self._span("transfer", began_s - reply.transfer_s, began_s)
        self._span("decode", began_s, now_s, pool="decode")

    def _cut_short(self, why: str, now_s: float) -> None:
        """The phase it was in when it ended. A stop string ends decode like this too, and that is no error."""
        if self._is_prefill_all:
            return
        if self._handed_over_s is not None:
            error = None if why == "cancelled" else why
            self._span("decode", self._handed_over_s, now_s, error, pool="decode")
        elif self._admitted_s is None:
            self._span("queue", self._opened_s, now_s, why, pool="decode")
        elif self._prefilled_s is not None:
            self._span("transfer", self._prefilled_s, now_s, why)
        else:
            self._span("prefill", self._admitted_s, now_s, why)

    def _span(self, name: str, start_s: float, end_s: float, error: str | None = None, pool: str | None = None) -> None:
        attributes = self._attributes if pool is None else {**self._attributes, "splitserve.pool": pool}
        self._maker.make(name, self._context, start_s, end_s, attributes, error)
