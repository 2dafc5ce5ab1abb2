"""What a campaign has measured, one JSON line each: kept where the machine keeps it, and where it is brought back from.

A line is a run at a rate (`workload`, `rate`, `count` and its figures) or whatever else a piece came to. The last line
of a run counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.goodput_search import Limits, RatePoint

Line = dict[str, Any]
CUT = "cut"  # the workload of figures of a piece that did not come to its end


class InUse(Exception):
    """Another campaign writes there; the message says where, and what to do."""


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """No other campaign writes to this file, which is made, or into this folder meanwhile. Raises InUse."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    opened = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another campaign writes there; two side by side have a --state and an --out each"
            raise InUse(f"{path}: {reason}") from None
        yield
    finally:
        os.close(opened)


class CampaignRecord:
    """Lines of earlier calls, and of this one."""

    def __init__(self, written_to: Sequence[Path], read_from: Sequence[Path]) -> None:
        """written_to: each gets every line. read_from: those of them that exist."""
        self._paths = list(dict.fromkeys(written_to))
        found = dict.fromkeys(path.resolve() for path in (*read_from, *written_to) if path.exists())
        texts = dict.fromkeys(line for path in found for line in path.read_text().splitlines() if line.strip())
        self.lines: list[Line] = [json.loads(text) for text in texts]
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{text}\n" for text in texts))

    def add(self, line: Line) -> None:
        """Keeps it, on disk too, before it returns."""
        self.lines.append(line)
        for path in self._paths:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def of(self, piece: str, workload: str | None = None, rate: float | None = None) -> Line | None:
        """The last such line; None: it was not measured, or it went wrong."""
        for line in reversed(self.lines):
            is_it = line["piece"] == piece and line.get("workload") == workload
            if is_it and (rate is None or line.get("rate") == rate):
                return None if "error" in line else line
        return None

    def points(self, piece: str, workload: str, limits: Limits) -> list[RatePoint]:
        """Every rate of a workload that was run, by the last run of it."""
        runs = {
            line["rate"]: limits.ratio(line)
            for line in self.lines
            if line["piece"] == piece and line.get("workload") == workload and "error" not in line
        }
        return [RatePoint(rate, ratio) for rate, ratio in sorted(runs.items())]
