"""Faults that tests ask for by files in a folder (config `testing.fault_dir`); without a folder, nothing happens.

`hold.<point>`     while the file exists, that phase does not go on.
`freeze.<point>`   while the file exists, the thread that comes there stands still.
`corrupt.received` once: a received block is overwritten before it is verified or used.
`zero.source`      while the file exists: a source's blocks are zeroed after their transfer was confirmed.
`slow.reads`       while the file exists: reads of KV go at so many bytes a second as it says, such as 5e8.
A fault that happened leaves `did.<name>` behind, so that a test can tell it from one that did not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

_FROZEN_POLL_S = 0.25  # seldom: to stand still is to use no CPU time


class FaultPoints:
    """Asked by the engine thread and the transfer thread. One `stat` a question, none without a folder."""

    def __init__(self, fault_dir: str | None, pool: torch.Tensor) -> None:
        self._dir = Path(fault_dir) if fault_dir else None
        self._pool = pool

    def hold(self, point: str) -> bool:
        """Whether the phase `point` is to wait."""
        if self._dir is None or not (self._dir / f"hold.{point}").exists():
            return False
        self._did(f"hold.{point}")
        return True

    def freeze(self, point: str) -> None:
        """Stand still here for as long as the test wants it."""
        while self._dir is not None and (self._dir / f"freeze.{point}").exists():
            self._did(f"freeze.{point}")
            time.sleep(_FROZEN_POLL_S)

    def after_read(self, transfer_id: str, local_block_ids: Sequence[int]) -> None:
        """Called when a read has ended, before its blocks are verified or used."""
        if self._dir is None:
            return
        try:  # a rename happens once, however many engines share the folder
            (self._dir / "corrupt.received").rename(self._dir / "did.corrupt.received")
        except FileNotFoundError:
            return
        self._pool[local_block_ids[0]] = 1.0

    def after_confirm(self, transfer_id: str, source_block_ids: Sequence[int]) -> None:
        """Called at the source when the reader's blocks are confirmed, before the source's are freed."""
        if self._dir is None or not (self._dir / "zero.source").exists():
            return
        self._pool[list(source_block_ids)] = 0.0
        self._did("zero.source")

    def slow_reads_bytes_per_s(self) -> float | None:
        """How fast a read that starts now is to go; None: as fast as it can. What is no such number changes nothing."""
        if self._dir is None:
            return None
        try:
            bytes_per_s = float((self._dir / "slow.reads").read_text())
        except (OSError, ValueError):
            return None
        if not 0.0 < bytes_per_s < math.inf:
            return None
        self._did("slow.reads")
        return bytes_per_s

    def _did(self, name: str) -> None:
        assert self._dir is not None
        path = self._dir / f"did.{name}"
        if not path.exists():
            os.close(os.open(path, os.O_CREAT))
