"""The sections of the config by who goes by them: what changes for one need not restart the others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.access import AuthConfig, CorsConfig
from cluster.config.fairness import FairnessConfig
from cluster.config.lifecycle import LifecycleConfig
from cluster.config.limits import LimitsConfig
from cluster.config.migration import MigrationConfig
from cluster.config.model import ModelConfig
from cluster.config.prefix_cache import CacheIsolation, PrefixCacheConfig
from cluster.config.routing import RoutingConfig
from cluster.config.section import Section
from cluster.config.service import FaultsConfig, IngressConfig, KVConfig, LoggingConfig, ServerConfig, TransferConfig
from cluster.config.slo import SloConfig
from cluster.config.speculative import SpeculativeConfig
from cluster.config.structured_outputs import StructuredOutputsConfig
from cluster.config.tracing import TracingConfig


class SharedConfig(Section):
    """What ingresses and engines go by alike."""

    model: ModelConfig = Field(default=ModelConfig(), description="The model that is served")
    layout: Literal["split", "colocated", "two_lanes"] = Field(
        default="split",
        description="split: prefill and decode on separate pools. colocated: only the decode pool, which prefills too, "
        "in the same steps. two_lanes: likewise, but in steps of their own beside those of generation",
    )
    kv: KVConfig = Field(default=KVConfig(), description="The paged KV cache")
    prefix_cache: PrefixCacheConfig = Field(
        default=PrefixCacheConfig(), description="What is kept of prompts that were computed"
    )
    transfer: TransferConfig = Field(default=TransferConfig(), description="The handoff from prefill to decode")
    speculative: SpeculativeConfig = Field(
        default=SpeculativeConfig(), description="How tokens are guessed ahead, several in a step"
    )
    structured_outputs: StructuredOutputsConfig = Field(
        default=StructuredOutputsConfig(), description="How answers are held to grammars"
    )
    lifecycle: LifecycleConfig = Field(default=LifecycleConfig(), description="How replicas leave, and their health")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="What is logged")
    testing: FaultsConfig = Field(default=FaultsConfig(), description="For SplitServe's own tests; leave it out")

    @property
    def kv_dtype(self) -> str:
        """Of the KV cache: the model's, or "fp8"."""
        return self.model.dtype if self.kv.dtype == "auto" else self.kv.dtype


class ServingConfig(SharedConfig):
    """All that an ingress goes by, but the pools."""

    server: ServerConfig = Field(default=ServerConfig(), description="Where HTTP is served")
    auth: AuthConfig = Field(default=AuthConfig(), description="Who may call the API, by API keys")
    cors: CorsConfig = Field(default=CorsConfig(), description="Web pages that may call the API")
    ingress: IngressConfig = Field(default=IngressConfig(), description="The replicas that take HTTP requests")
    slo: SloConfig = Field(default=SloConfig(), description="What users are promised")
    routing: RoutingConfig = Field(default=RoutingConfig(), description="Which replicas a request goes to")
    migration: MigrationConfig = Field(
        default=MigrationConfig(), description="Running requests that move to another decode replica"
    )
    fairness: FairnessConfig = Field(default=FairnessConfig(), description="How the server's users share it")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="What one HTTP request may ask for")
    tracing: TracingConfig = Field(default=TracingConfig(), description="OpenTelemetry traces of requests")

    @property
    def cache_isolation(self) -> CacheIsolation:
        """Who finds in prefix caches what others have computed."""
        return self.prefix_cache.isolation_with(self.auth)
