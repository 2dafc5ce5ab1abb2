"""`python -m benchmarks.control_path.span_cost`: CPU time of one request's spans in an ingress, without Ray and HTTP.

`tracing_cost` has the whole path, whose noise on a busy machine is larger than what it looks for.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.control_path.tracing_cost import collector
from cluster.config.tracing import TracingConfig
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.otel_tracing import Tracing, open_tracing
from cluster.policies.routing_policy import Route, RouteKind
from replicas.messages import CallStatus, EngineLoad, GenerateReply, PrefillReply

_NUM_REQUESTS = 1_000
_ROUTE = Route(RouteKind.REMOTE, "decode", "prefill", must_wait=False, decode_blocks=3)
_PREFILLED = PrefillReply(CallStatus.OK, "", (), 0.001, 0.01, EngineLoad(1, 0, 0, 10, 10, 0.0))
_GENERATED = GenerateReply(CallStatus.OK, "", ((0, 64),), 0.001, 0.002, 0.3)


async def main() -> int:
    with collector() as (endpoint, received):
        tracing = open_tracing(TracingConfig(endpoint=endpoint), "model", IngressMetrics("model", "1", "2"))
        assert tracing is not None
        await _trace(tracing, 200)  # warm
        loop_s, all_s = time.thread_time(), time.process_time()
        await _trace(tracing, _NUM_REQUESTS)
        loop_s = time.thread_time() - loop_s
        await asyncio.to_thread(tracing.stop)
        all_s = time.process_time() - all_s
    loop_us, all_us = (1e6 * seconds / _NUM_REQUESTS for seconds in (loop_s, all_s))
    print(f"{loop_us:.0f} us of the event loop a request, {all_us:.0f} us with the export and the collector here")
    return 0 if received else 1


async def _trace(tracing: Tracing, num_requests: int) -> None:
    async def call() -> GenerateReply:
        return _GENERATED

    done = asyncio.create_task(call())
    await done
    for number in range(num_requests):
        trace = tracing.request("/v1/chat/completions", {})
        trace.prompt(100)
        attempt = trace.attempt(_ROUTE)
        attempt.admitted()
        attempt.prefilled(_PREFILLED)
        trace.first_token()
        attempt.handed_over()
        attempt.ended(done)
        trace.over("ok", ["stop"], 64)
        if number % 50 == 49:
            await asyncio.sleep(0.05)  # as requests come: the exporter keeps up


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
