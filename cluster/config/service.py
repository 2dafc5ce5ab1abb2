"""Everything around the engines: HTTP, ingress, KV handoff, logging, Ray."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cluster.config.autoscaling import IngressAutoscalingConfig
from cluster.config.section import (
    Cpus,
    Host,
    LocalPath,
    NodeLabels,
    OneOf,
    Port,
    Seconds,
    Section,
    base_dir_of,
)
from replicas.kv.transport_table import TRANSPORTS

ServeProxy = Literal["serve", "haproxy"]
# By the variable that sets each: statistics for people and for Prometheus, Serve's proxy for when there is no ingress.
HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
INGRESS_PORTS = range(30_000, 31_001)  # Ray gives them to ingresses behind it


class ServerConfig(Section):
    """Where HTTP is served."""

    host: Host = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for all of this machine's")
    port: Port = Field(default=8_000, description="TCP port; below 1024 usually needs root")
    proxy: ServeProxy = Field(
        default="serve",
        description="Who takes connections: serve, Ray Serve's own proxy; or haproxy, in front of the ingresses, which "
        "brings a first token 10 to 15 ms sooner. Ingresses then listen too, on host and ports from 30000 on. Decided "
        "when Ray starts",
    )
    openapi: bool = Field(default=True, description="Publish the API's description at /openapi.json")
    docs: bool = Field(
        default=False,
        description="Serve a page to read and try the API at /docs; needs openapi, and loads scripts from a CDN",
    )


class IngressConfig(Section):
    """The replicas that take HTTP requests and route them."""

    replicas: int = Field(default=1, ge=1, le=256, description="How many ingress replicas; they share nothing")
    autoscaling: IngressAutoscalingConfig | None = Field(
        default=None, description="Let ingresses grow and shrink with open requests, instead of `replicas`"
    )
    max_queued_requests: int = Field(
        default=256,
        ge=0,
        le=1_000_000,
        description="Most requests in each ingress that wait for memory or a slot. Beyond: status 429",
    )
    queue_timeout_s: Seconds = Field(
        default=30.0,
        description="Longest wait for admission, while no decode replica is on its way. Beyond: status 429. Also for a "
        "pool of which all replicas stand still. Beyond: status 503",
    )
    cold_start_timeout_s: Seconds = Field(
        default=300.0,
        description="Longest wait for replicas that were ordered: for the first one of a pool that autoscaling had "
        "emptied or that has lost all it had, or for one that is to have room. Beyond: status 503",
    )
    request_timeout_s: Seconds = Field(default=600.0, description="Longest life of a request, its stream included")
    max_retries: int = Field(
        default=2, ge=0, le=10, description="How often a request is tried again on other replicas after a failure"
    )
    channel_host: Host = Field(
        default="127.0.0.1",
        description="Address where an ingress receives tokens; decode replicas connect to it, so across machines it "
        "is one they can reach: auto takes the one by which Ray knows each ingress's own node",
    )
    num_cpus: Cpus = Field(default=1.0, description="Logical CPUs Ray reserves for each ingress; limits nothing")
    node_labels: NodeLabels = Field(
        default={}, description="Labels that the Ray node of an ingress must have, as those of a pool"
    )

    @property
    def first_replicas(self) -> int:
        """Replicas when the server starts."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def most_replicas(self) -> int:
        """Replicas when there are as many as there may be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @field_validator("channel_host")
    @classmethod
    def _check_connectable(cls, host: str) -> str:
        if host in {str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))}:
            raise ValueError("is nothing that a decode replica can connect to; expected the address of this machine")
        return host


class KVConfig(Section):
    """The paged KV cache, the same in all pools."""

    block_size: Literal[8, 16, 32, 64, 128] = Field(
        default=16, description="Tokens in a block, the unit in which KV memory is given out and moved"
    )
    dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Number type of the KV cache. auto: the model's. fp8: 8 bits (e4m3), so half the memory and half "
        "the handoff of 16 bits; keys and values are rounded before attention, with the checkpoint's k_scale and "
        "v_scale if it has them. On GPUs it needs compute capability 8.9",
    )


class TransferConfig(Section):
    """How a prompt's KV cache gets from a prefill replica to a decode replica."""

    backend: Annotated[str, OneOf(TRANSPORTS)] = Field(
        default="UCX", description="The transport that moves the bytes. UCX: NIXL, with its UCX backend"
    )
    lease_s: Seconds = Field(
        default=30.0,
        description="How long a prefill replica keeps blocks whose reader is silent; living readers renew it",
    )
    verify_digest: bool = Field(
        default=True, description="Compare a digest of the bytes read with the source's before they are used"
    )
    net_devices: str | None = Field(
        default=None,
        min_length=1,
        description='Network devices UCX may use, such as "mlx5_0:1" or "eth0"; null: loopback on CPUs, on GPUs UCX '
        "chooses",
    )
    max_bytes_in_flight: int = Field(
        default=512 * 1024**2,
        ge=1024**2,
        le=1024**4,
        description="Bytes that a decode replica reads from one prefill replica at a time; what comes later waits for "
        "its turn, and a prompt whose KV cache is larger is read alone",
    )
    handoff_timeout_s: Seconds = Field(
        default=30.0,
        description="Longest wait of a decode replica for the KV cache of a request it admitted, the prefill "
        "replica's queue and work included. Beyond: the request is tried on another pair",
    )


class LoggingConfig(Section):
    """What is logged."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="Least level logged")
    format: Literal["text", "json"] = Field(default="text", description="text for people, json for log collectors")
    access: bool = Field(
        default=True,
        description="A line of level INFO for each request: status, tokens in and out, times, id; no text. Health "
        "checks and /metrics get none",
    )
    throughput: bool = Field(
        default=True,
        description="A line of level INFO every ten seconds in which there is work: requests, tokens a second, KV "
        "cache",
    )
    file: LocalPath | None = Field(
        default=None,
        description="Where `splitserve serve` writes the log of Ray and of all replicas, of which the terminal shows "
        "what concerns people; null: logs/serve-PORT.log in model.cache_dir. The one before it is kept, ending in .1",
    )


class RayConfig(Section):
    """The Ray instance that `splitserve serve` starts."""

    object_store_memory_bytes: int = Field(
        default=100_000_000,
        ge=75 * 1024**2,
        description="Shared memory of Ray's object store. Nothing large goes through it: keep it small",
    )
    num_cpus: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Logical CPUs Ray gives out, may exceed the cores; null: what all replicas reserve, and one more",
    )
    include_dashboard: bool = Field(default=False, description="Serve Ray's dashboard on 127.0.0.1:8265")


class FaultsConfig(Section):
    """For SplitServe's own tests and measurements. Leave it out."""

    fault_dir: LocalPath | None = Field(
        default=None,
        description="Folder whose files hold replicas at chosen points or slow their reads of KV; tests only, never in "
        "production",
    )

    step_record_dir: LocalPath | None = Field(
        default=None,
        description="Folder into which every engine writes what was in each step and how long it took, for "
        "`splitserve fit-steps`",
    )

    @field_validator("fault_dir", "step_record_dir")
    @classmethod
    def _check_folder(cls, folder: LocalPath | None, info: ValidationInfo) -> LocalPath | None:
        if folder is not None and base_dir_of(info) is not None and not folder.is_dir():
            raise ValueError("is no existing folder")
        return folder
