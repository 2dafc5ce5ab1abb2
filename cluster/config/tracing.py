"""OpenTelemetry traces of requests."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.section import Seconds, Section, base_dir_of


class TracingConfig(Section):
    """One trace of each request, with its phases as spans. Off without an endpoint."""

    endpoint: str | None = Field(
        default=None,
        max_length=1_024,
        description="Base URL of an OTLP/HTTP collector, such as http://otel-collector:4318: spans go to its "
        "/v1/traces. null: no traces. Headers it asks for are taken from the variable OTEL_EXPORTER_OTLP_HEADERS",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of requests that are traced, but for those whose traceparent header has decided already",
    )
    service_name: str = Field(default="splitserve", min_length=1, max_length=128, description="service.name of spans")
    export_timeout_s: Seconds = Field(
        default=10.0, description="Longest time for one export. What can't be delivered is dropped and counted"
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None, info: ValidationInfo) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("is no base URL of a collector; expected one such as http://otel-collector:4318")
        # A file is checked for the machine that it is on; a config for other machines is made without a folder.
        if base_dir_of(info) is not None and not _has_exporter():
            raise ValueError("needs packages that are not installed; run: pip install '.[otel]' in SplitServe's folder")
        return endpoint

    @property
    def traces_url(self) -> str | None:
        """Where spans are sent."""
        return None if self.endpoint is None else f"{self.endpoint.rstrip('/')}/v1/traces"


def _has_exporter() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of one of the packages it lies in
        return False
