"""What a replica is told at its start. Plain data: `cluster.app` makes it from the config, nothing here reads files."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.admission import AdmissionPolicy


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """source: a transformers folder, a .gguf file (converted once, into cache_dir), or a Hub id."""

    source: str
    cache_dir: str
    dtype: str
    max_model_len: int
    load_format: str  # "auto" | "dummy"
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class TransferSettings:
    backend: str
    lease_s: float
    verify_digest: bool
    net_devices: str | None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """pool: "prefill" | "decode". kv_memory_bytes is used when kv_capacity_tokens is None."""

    pool: str
    served_model_name: str
    model: ModelSettings
    transfer: TransferSettings
    device: str  # "cpu" | "cuda"
    num_threads: int
    block_size: int
    kv_capacity_tokens: int | None
    kv_memory_bytes: int | None
    kv_memory_fraction: float | None
    max_sequences: int
    max_step_tokens: int
    lag: int
    # Decode only: how it admits, and the host memory for requests that give way (None: as the policy needs it).
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    host_memory_bytes: int | None = None
    idle_frame_s: float = 0.5
    channel_stall_s: float = 10.0
    # How long it may take to leave; and after how long of doing nothing, with work, it ends itself.
    drain_timeout_s: float = 120.0
    restart_after_s: float = 30.0
    fault_dir: str | None = None
    step_record_dir: str | None = None
    version: str = ""  # of SplitServe and of Ray, for the metrics
    ray_version: str = ""
    log_level: str = "INFO"
    log_format: str = "json"
