"""What a replica is told at its start. Plain data, made of the config's sections by their names (`cluster.same_names`):
whoever needs another key adds a field of its name here. Nothing here reads files.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any

from replicas.grammars.grammar_fuel import GrammarFuel
from scheduler.admission import AdmissionPolicy
from scheduler.lane_split import LaneObjectives

_UNCONFIGURED = {"unconfigured": True}


def unconfigured(default: Any) -> Any:
    """The default of a field that no key of the config has: tests set it."""
    return field(default=default, metadata=_UNCONFIGURED)


def is_configured(setting: Field[Any]) -> bool:
    """Whether it comes from the config."""
    return setting.metadata != _UNCONFIGURED


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """source: a transformers folder, a .gguf file (converted once, into cache_dir), or a Hub id. quantise: to what
    weights are rounded at load, if to anything.
    """

    source: str
    cache_dir: str
    dtype: str
    max_model_len: int
    load_format: str  # "auto" | "dummy"
    trust_remote_code: bool
    quantise: str = "none"  # | "fp8" | "int8" | "int4"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """dtype: "auto", the model's, or "fp8"."""

    block_size: int
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """backend: a name in `replicas.kv.transport_table`. max_bytes_in_flight: read from one peer at a time."""

    backend: str
    lease_s: float
    verify_digest: bool
    net_devices: str | None
    max_bytes_in_flight: int


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    """How long it may take to leave; and after how long of doing nothing, with work, a replica ends itself."""

    drain_timeout_s: float = 120.0
    restart_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    level: str = "INFO"
    format: str = "json"


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """Folders, for SplitServe's own tests and measurements."""

    fault_dir: str | None = None
    step_record_dir: str | None = None


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """How texts are held against grammars. cache_entries, cache_bytes: of compiled ones that are kept."""

    grammar_threads: int = 2
    cache_entries: int = 512
    cache_bytes: int = 256_000_000
    fuel: GrammarFuel = field(default_factory=GrammarFuel)


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How tokens are drafted. method: "none" | "grammar" | "ngram" | "draft_model" | "eagle3", the last two by `model`,
    a folder or a Hub id; on a CPU all but "none" with what grammars force. max_drafts: of a row in a step. ngram_min,
    ngram_max: tokens that must have stood together before.
    """

    method: str = "none"
    model: str | None = None
    max_drafts: int = 7
    ngram_min: int = 2
    ngram_max: int = 4


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sections of the config, and the keys of the pool. pool: "prefill" | "decode". kv_memory_bytes is used when
    kv_capacity_tokens is None.
    """

    pool: str
    served_model_name: str
    model: ModelSettings
    kv: KvSettings
    transfer: TransferSettings
    device: str  # "cpu" | "cuda"
    num_threads: int
    kv_capacity_tokens: int | None
    kv_memory_bytes: int | None
    kv_memory_fraction: float | None
    max_running_sequences: int
    max_batch_tokens: int
    lag: int
    has_prefix_cache: bool = True
    may_also: bool = False  # do the other pool's work too
    layout: str = "split"  # "two_lanes": prompts are computed beside the rows, where the device can do that
    # Host memory for requests that give way, and for cached blocks (None: as the admission needs it).
    host_memory_bytes: int | None = None
    # Decode only: how it admits.
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    lanes: LaneObjectives = field(default_factory=LaneObjectives)  # decode only, with two lanes
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
    speculative: SpeculationSettings = field(default_factory=SpeculationSettings)
    structured_outputs: GrammarSettings = field(default_factory=GrammarSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    testing: FaultSettings = field(default_factory=FaultSettings)
    idle_frame_s: float = unconfigured(0.5)
    channel_stall_s: float = unconfigured(10.0)
    version: str = unconfigured("")  # of SplitServe and of Ray, for the metrics
    ray_version: str = unconfigured("")
