"""The pools of engine replicas."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.config.autoscaling import GUESSED_START_S, PoolAutoscalingConfig
from cluster.config.section import Cpus, Gpus, NodeLabels, Seconds, Section


class PoolConfig(Section):
    """One pool of equal replicas. Exactly one of the three kv_ sizes is given."""

    replicas: int = Field(default=1, ge=1, le=1_024, description="How many replicas the pool has")
    autoscaling: PoolAutoscalingConfig | None = Field(
        default=None, description="Let the pool grow and shrink with its work, instead of `replicas`; null: it does not"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="What the replicas compute on")
    num_threads: int = Field(
        default=1,
        ge=1,
        le=1_024,
        description="CPU threads torch uses in each replica, fixed. More threads than cores make all replicas slow",
    )
    kv_capacity_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache in tokens: a multiple of kv.block_size and at least model.max_model_len",
    )
    kv_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache in bytes; the start-up log says how many tokens that is",
    )
    kv_memory_fraction: float | None = Field(
        default=None,
        ge=0.05,
        le=0.98,
        description="Size of the KV cache as a share of the GPU memory that is free after loading; cuda only",
    )
    max_running_sequences: int = Field(
        default=32,
        ge=1,
        le=4_096,
        description="Most sequences in work at once in each replica; each choice of a request is one. Others wait",
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=8,
        le=1_048_576,
        description="Most tokens one engine step computes: prompt tokens plus one for each running sequence. Larger: "
        "faster prompts, but each step takes longer",
    )
    host_memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Host memory of each replica for the prefix cache: what goes from its KV cache stays there a "
        "while. null: none",
    )
    may_also: bool = Field(
        default=False,
        description="Let its replicas do the other pool's work too, where routing.policy roles_by_cost finds that "
        "cheaper: of prefill, generate; of decode, compute prompts for others. For pools of equal cards",
    )
    num_cpus: Cpus = Field(default=1.0, description="Logical CPUs Ray reserves for each replica; limits nothing")
    num_gpus: Gpus = Field(
        default=0.0,
        description="GPUs Ray reserves for each replica; device cuda needs more than 0, usually 1",
    )
    node_labels: NodeLabels = Field(
        default={},
        description="Labels that the Ray node of a replica must have, as {splitserve.io/pool: prefill}. For clusters: "
        "the Ray that `splitserve serve` starts has none",
    )
    lag: int = Field(
        default=0,
        ge=0,
        le=1,
        description="Steps planned ahead of known tokens. 1 on GPUs: the next step is ready when one ends. 0 on CPUs, "
        "where a step runs to its end when it is launched and 1 would only delay each token by a step",
    )

    @property
    def first_replicas(self) -> int:
        """Replicas when the server starts."""
        return self.replicas if self.autoscaling is None else self.autoscaling.at_start

    @property
    def most_replicas(self) -> int:
        """Replicas when it has grown as far as it may."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def expected_start_s(self) -> float:
        """How long a replica is taken to take to start."""
        return GUESSED_START_S if self.autoscaling is None else self.autoscaling.expected_start_s

    @property
    def may_be_empty(self) -> bool:
        """Whether it can have no replica while all is well: the next request starts one."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0


class AdmissionConfig(Section):
    """Whom a decode replica admits: whose projected memory fits beside that of all others, at every step to come."""

    output_length: Literal["bound", "quantile"] = Field(
        default="bound",
        description="How long an output is taken to be. bound: all of its max_tokens, so memory never runs short. "
        "quantile: as long as most that ended before; admits more, and preempts when that was too little",
    )
    quantile: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="With output_length quantile: the share of outputs that end within the length assumed",
    )
    watermark_fraction: float = Field(
        default=0.02, ge=0, le=0.5, description="Share of the KV cache that admission leaves free"
    )
    max_overtakes: int = Field(
        default=8,
        ge=0,
        le=1_024,
        description="Later requests that may be admitted before one that does not fit yet; then all wait for it",
    )


class LanesConfig(Section):
    """With layout two_lanes: how a card is divided between prompts and generation while both are there."""

    ttft_s: Seconds = Field(
        default=1.0, description="Longest time to the first token, its wait included, that the division aims at"
    )
    token_gap_s: Seconds = Field(
        default=0.05, description="Longest time between two tokens of a stream that the division aims at"
    )


class DecodePoolConfig(PoolConfig):
    """A pool whose replicas hold requests until they end."""

    admission: AdmissionConfig = Field(
        default=AdmissionConfig(), description="Whom a replica admits, by the memory that will be needed"
    )
    host_memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Host memory of each replica for requests that are preempted (without, they are computed again), "
        "and what they leave of it for the prefix cache. null: as much as its KV cache with output_length quantile, "
        "else none",
    )
    lanes: LanesConfig = Field(
        default=LanesConfig(),
        description="With layout two_lanes: what the division of a card between its lanes aims at",
    )


class PoolsConfig(Section):
    """The two pools."""

    prefill: PoolConfig | None = Field(
        default=None,
        description="Replicas that compute prompts and hand their KV cache over. Layout split needs it, the "
        "others have none",
    )
    decode: DecodePoolConfig = Field(
        description="Replicas that generate; with layouts colocated and two_lanes they compute prompts too"
    )

    min_prefill_decode_ratio: float = Field(
        default=0.125,
        gt=0,
        le=64,
        description="Where both pools scale: fewest prefill replicas for each decode replica; prefill grows if need be",
    )
    max_prefill_decode_ratio: float = Field(
        default=8.0,
        gt=0,
        le=64,
        description="Where both pools scale: most prefill replicas for each decode replica; decode grows if need be",
    )

    @property
    def autoscales(self) -> bool:
        """Whether any pool scales by itself."""
        return any(pool.autoscaling is not None for pool in self.deployed().values())

    def deployed(self) -> dict[str, PoolConfig]:
        """Pools by name, in the order of a request's path."""
        pools = {"prefill": self.prefill, "decode": self.decode}
        return {name: pool for name, pool in pools.items() if pool is not None}
