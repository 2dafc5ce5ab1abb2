"""What the HTTP app asks of the ingress that it belongs to. `cluster.serving.ingress` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.config.serving import ServingConfig
    from cluster.lifecycle.ingress_drain import IngressDrain
    from cluster.lifecycle.readiness import Readiness
    from cluster.monitoring.ingress_metrics import IngressMetrics
    from cluster.monitoring.otel_tracing import Tracing
    from cluster.openai.generation_service import GenerationService
    from cluster.openai.responses.responses_service import ResponsesService
    from cluster.openai.sampling_defaults import SamplingDefaults
    from cluster.openai.tokenize_service import TokenizeService
    from cluster.text.work_threads import WorkThreads


class HttpBackend(Protocol):
    """started_at: Unix time in seconds. tracing: None while it is switched off."""

    config: ServingConfig
    metrics: IngressMetrics
    drain: IngressDrain
    tracing: Tracing | None
    started_at: int
    threads: WorkThreads
    service: GenerationService
    responses_service: ResponsesService
    tokenize_service: TokenizeService
    sampling_defaults: SamplingDefaults

    def readiness(self) -> Readiness:
        """Whether requests can be served now, and if not, why."""

    async def render_metrics(self) -> bytes:
        """Every replica's series of every pool, Prometheus text."""
