"""A GGUF file turned once into a transformers folder, so that every replica loads it in seconds.

transformers reads GGUF itself, but parses and dequantises it anew at every start (26 s for a 94 MiB file
on the CPU here, against 2 s for the folder); with four replicas on two cores that is minutes.

The folder goes by the file's whole content: two fine-tunes differ in nothing else. Each start hashes it (0.6 s a GB).
Imports torch only when there is something to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from replicas.model_support import UnsupportedModel
from replicas.start_step import start_step

logger = logging.getLogger(__name__)

_FORMAT = 3  # raise when what is written changes
_COMPLETE = "complete"
_CHUNK_BYTES = 1 << 24


def resolve_source(source: str, cache_dir: str) -> str:
    """What transformers can load: the source itself, or the folder that a GGUF was converted into. May block."""
    return str(convert(Path(source), Path(cache_dir))) if source.endswith(".gguf") else source


def converted_folder(gguf: Path, cache_dir: Path) -> Path:
    """Where the conversion of this very content by these libraries lies, whether or not it exists. Reads the file."""
    by = f"{_FORMAT}:{version('transformers')}:{version('gguf')}:{_digest(gguf)}"
    return cache_dir / f"{gguf.stem}-{hashlib.sha256(by.encode()).hexdigest()[:32]}"


def is_converted(folder: Path) -> bool:
    """Whether the conversion came to its end, and every file that it wrote is there in its size."""
    try:
        sizes: dict[str, int] = json.loads((folder / _COMPLETE).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def convert(gguf: Path, cache_dir: Path) -> Path:
    """Convert unless done already; returns the folder. Blocks; safe against concurrent callers (file lock).

    Raises UnsupportedModel for a file that can't be served, or that changed meanwhile; OSError.
    """
    before = _identity(gguf)
    folder = converted_folder(gguf, cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{folder.name}.lock").open("w") as lock:
        _wait_for(lock)
        if not is_converted(folder):
            _convert_anew(gguf, folder, before)
    return folder


def _wait_for(lock: TextIO) -> None:
    """Until nobody else converts this file. Blocks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with start_step("waiting for another replica, which converts the GGUF"):
            fcntl.flock(lock, fcntl.LOCK_EX)


def _convert_anew(gguf: Path, folder: Path, before: tuple[int, ...]) -> None:
    """The folder appears under its name when it is whole. before: the file's identity before it was hashed."""
    from replicas.gguf.weights import write_model

    logger.info(
        "converting GGUF, once; takes about half a minute for 100 MB",
        extra={"event": "gguf_converting", "file": str(gguf), "size_bytes": gguf.stat().st_size},
    )
    started_at = time.monotonic()
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with start_step("converting the GGUF, once"):
            write_model(gguf, partial)
        # Times can be set back, and what was written over can be restored: each would escape the other.
        if _identity(gguf) != before or converted_folder(gguf, folder.parent) != folder:
            raise UnsupportedModel(f"{gguf} changed while it was converted: start again when it is complete")
        _seal(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    seconds = round(time.monotonic() - started_at, 1)
    logger.info("converted GGUF", extra={"event": "gguf_converted", "folder": str(folder), "seconds": seconds})


def _seal(folder: Path) -> None:
    """Write down what is there, once it is on the disk: a crash of the machine must not leave zeros that look whole."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    (folder / _COMPLETE).write_text(json.dumps(sizes))


def _identity(path: Path) -> tuple[int, ...]:
    """What changes whenever somebody writes to the file or puts another in its place."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(path: Path) -> str:
    """SHA-256 of the whole file. Logs progress while it takes long."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    step = start_step("hashing the GGUF", path.stat().st_size, "bytes")
    with path.open("rb", buffering=0) as file, step as progress:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            progress.advance(num_bytes)
    return digest.hexdigest()
