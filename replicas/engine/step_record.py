"""One measured step, and the file that it lies in: what an engine writes down and `splitserve fit-steps` reads."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scheduler.step_shape import StepShape

_FILE_NAME = re.compile(r"(prefill|decode)-\d+\.jsonl")


class StepRecord(NamedTuple):
    """Times on the monotonic clock of the machine."""

    start_s: float
    end_s: float
    shape: StepShape

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def line(self) -> str:
        """A JSON array: start, end, then the numbers of the shape."""
        return json.dumps([round(self.start_s, 6), round(self.end_s, 6), *self.shape])

    @staticmethod
    def of_line(line: str | bytes) -> StepRecord:
        """What `line` made, to the microsecond. Raises ValueError for anything else."""
        columns = json.loads(line)
        if not isinstance(columns, list) or len(columns) != 2 + len(StepShape._fields):
            raise ValueError(f"no step record: {line!r:.80}")
        start_s, end_s, *shape = columns
        if not all(type(count) is int for count in shape) or not isinstance(start_s, int | float):
            raise ValueError(f"no step record: {line!r:.80}")
        if not isinstance(end_s, int | float) or not 0 <= start_s <= end_s < math.inf:
            raise ValueError(f"no step record: {line!r:.80}")
        return StepRecord(start_s, end_s, StepShape(*shape))


def record_file(folder: str, pool: str) -> Path:
    """Where this process writes."""
    return Path(folder, f"{pool}-{os.getpid()}.jsonl")


def record_files(folder: Path) -> Iterable[tuple[str, Path]]:
    """Those in a folder with their pools, sorted by name; other files are left out. Raises OSError."""
    for path in sorted(folder.iterdir()):
        if found := _FILE_NAME.fullmatch(path.name):
            yield found[1], path
