"""Whether there is room on the disk for what a first start writes: a GGUF file is converted, once. Reads the disk."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator

from cluster.config.model import ModelConfig, SourceKind
from cluster.launch.fit import Finding
from cluster.launch.machine import show_bytes
from cluster.launch.model_facts import ModelFacts


def disk_findings(model: ModelConfig, facts: ModelFacts) -> Iterator[Finding]:
    """Nothing where an earlier start has converted a file of that name."""
    path = model.local_path()
    if model.kind not in (SourceKind.GGUF, SourceKind.BUNDLED) or path is None:
        return
    folder = model.cache_dir
    if any(folder.glob(f"{glob.escape(path.stem)}-*")):
        return
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    key = f"model.cache_dir: {path.name} is converted into {folder}, once"
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Finding(f"{key}, but {there} can't be written to; choose another folder: --set model.cache_dir=FOLDER")
        return
    needed, free = facts.converted_bytes(), shutil.disk_usage(there).free
    if needed > free:
        yield Finding(
            f"{key}, which takes {show_bytes(needed)}, but there are {show_bytes(free)} free; choose another folder: "
            "--set model.cache_dir=FOLDER"
        )
