"""A GGUF file turned once into a transformers folder, so that every replica loads it in seconds.

transformers reads GGUF itself, but parses and dequantises it anew at every start (26 s for a 94 MiB file
on the CPU here, against 2 s for the folder); with four replicas on two cores that is minutes.

Imports torch only when there is something to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise when what is written changes


def resolve_source(source: str, cache_dir: str) -> str:
    """What transformers can load: the source itself, or the folder that a GGUF was converted into. May block."""
    return str(convert(Path(source), Path(cache_dir))) if source.endswith(".gguf") else source


def converted_folder(gguf: Path, cache_dir: Path) -> Path:
    """Where the conversion of this very file lies, whether or not it exists yet. Reads 1 MiB of the file."""
    digest = hashlib.sha256()
    digest.update(f"{_FORMAT}:{gguf.stat().st_size}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
    return cache_dir / f"{gguf.stem}-{digest.hexdigest()[:12]}"


def is_converted(folder: Path) -> bool:
    return (folder / "complete").exists()


def convert(gguf: Path, cache_dir: Path) -> Path:
    """Convert unless done already; returns the folder. Blocks; safe against concurrent callers (file lock)."""
    folder = converted_folder(gguf, cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_converted(folder):
            logger.info(
                "converting GGUF, once; takes about half a minute",
                extra={"event": "gguf_converting", "file": str(gguf)},
            )
            shutil.rmtree(folder, ignore_errors=True)
            _convert_into(gguf, folder)
    return folder


def _convert_into(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    quantised = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # Weights are float32 tensors by now, but transformers refuses to save what was read from a GGUF: a
    # plain model of the same shape takes them over (on "meta": without a second copy).
    config = quantised.config
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    (folder / "complete").touch()
