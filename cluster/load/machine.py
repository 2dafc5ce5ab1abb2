"""What a figure was measured on: machine, load, versions. Figures without it say nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.version import VERSION

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("ray", "torch", "transformers", "pyzmq", "fastapi")


def describe_machine() -> dict[str, Any]:
    """Plain data, taken now. load_average: of the minute before the run; above 0.2 others were at work."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("describe", "--always", "--dirty") or VERSION,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def machine_line(machine: dict[str, Any]) -> str:
    """For people, above a table."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    return (
        f"{machine['date']}  commit {machine['commit']}  {machine['cores']} x {machine['cpu']}  "
        f"load average before {machine['load_average']}  Python {machine['python']}, {versions}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    if not (_ROOT / ".git").exists():  # installed: what lies around it is of another project
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
