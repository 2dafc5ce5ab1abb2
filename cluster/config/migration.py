"""Requests that move from one decode replica to another while they run."""

from __future__ import annotations

from pydantic import Field

from cluster.config.section import Section


class MigrationConfig(Section):
    """When running requests go on at another decode replica, and how many at a time."""

    enabled: bool = Field(
        default=True,
        description="Let what runs on a decode replica that leaves (scale-down, update, SIGTERM) go on at another one "
        "that has room, with its KV cache: it leaves in seconds. false: it ends there, for up to "
        "lifecycle.drain_timeout_s",
    )
    relieve_memory: bool = Field(
        default=True,
        description="Let a request go on at another decode replica that has room when the KV memory of its own runs "
        "short, instead of to host memory. Only with pools.decode.admission.output_length: quantile",
    )
    max_at_once: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Requests of one ingress on their way at a time. More empties a replica sooner; each takes its "
        "share of the network between decode replicas",
    )
