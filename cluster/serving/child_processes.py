"""Which processes a process has started, and those have, from /proc."""

from __future__ import annotations

from pathlib import Path


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """All of them that run now, parents before their children."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _parent(folder: Path) -> int | None:
    """None: it has ended meanwhile."""
    try:
        # proc(5): the name stands in parentheses and may hold any character; the state and the parent follow.
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
