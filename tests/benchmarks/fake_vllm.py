"""A program in vLLM's place, started as a campaign starts vLLM."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.campaign_pieces import WORKLOADS
from benchmarks.gpu.campaign_servers import Place


def place_of(folder: Path, program: str) -> Place:
    """program: its source; it gets vLLM's command line and environment. Writes into the folder."""
    package = folder / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(program)
    loads = {workload.name: workload for workload in WORKLOADS}
    return Place(folder, folder, folder, loads, folder / "site", 1, 3, (), {}, lambda seconds: True)
