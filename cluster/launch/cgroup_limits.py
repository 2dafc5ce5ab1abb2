"""What a container may use of its machine: limits of control groups, versions 1 and 2. Reads files only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 has no word for "no limit": a number of about 2**63 stands for it.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None: no limit. free_bytes: what is left of the tightest memory limit; page cache counts as free."""

    num_cores: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The tightest of this process's group and of those around it. Never raises: what can't be read limits nothing."""
    cores = [cores for folder in _folders(root, "cpu") if (cores := _cores(folder)) is not None]
    limits = [limit for folder in _folders(root, "memory") if (limit := _memory(folder)) is not None]
    return CgroupLimits(
        num_cores=min(cores, default=None),
        memory_bytes=min((limit for limit, _ in limits), default=None),
        free_bytes=min((max(limit - used, 0) for limit, used in limits), default=None),
    )


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Of the group and of all groups around it. In a container some may not be visible under their own names."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            hierarchy = mount
        elif controller in controllers.split(","):
            hierarchy = next((mount / name for name in (controllers, controller) if (mount / name).is_dir()), mount)
        else:
            continue
        group = hierarchy / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder == hierarchy or hierarchy in folder.parents)


def _cores(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """The limit, and what counts as used of it."""
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    cache = stat.get("inactive_file") or stat.get("total_inactive_file") or "0"
    return limit, max(used - int(cache), 0)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
