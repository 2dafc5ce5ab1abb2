"""A folder with few and small files: what a lent machine gives back."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

MOST_FILES = 8
_MOST_BYTES = 15 << 20  # of one
REST = "rest.tar.xz"


def few_files(folder: Path) -> None:
    """Leaves logs that lie at its top, of long ones the end, and puts all else into one archive; all of it where there
    are too many logs. Deletes what is in the archive."""
    logs = sorted(folder.glob("*.log"))
    for log in logs:
        _cut(log)
    kept = {REST, *(log.name for log in logs)} if len(logs) < MOST_FILES else {REST}
    rest = [path for path in sorted(folder.iterdir()) if path.name not in kept]
    if not rest:
        return
    with tarfile.open(folder / REST, "w:xz") as tar:
        for path in rest:
            tar.add(path, path.name)
    for path in rest:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if (size := (folder / REST).stat().st_size) > _MOST_BYTES:
        print(f"{REST} has {size >> 20} MiB: too large to come back", flush=True)


def _cut(log: Path) -> None:
    """Of a log that is too long the beginning is lost."""
    if log.stat().st_size > _MOST_BYTES:
        with log.open("rb") as file:
            file.seek(-_MOST_BYTES, 2)
            end = file.read()
        log.write_bytes(end)
