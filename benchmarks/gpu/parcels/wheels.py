"""Wheels for a machine that is not this one: which it lacks of what is asked for, and all of them in one folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

_GLIBC_MINORS = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # pip takes no wheel of a lower one by itself
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
_TARGET = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
_TARGET += [word for platform in _PLATFORMS for word in ("--platform", platform)]


class NoWheels(Exception):
    """pip found no way; what it said is in the text."""


def lacking(requirements: Sequence[str], present: Set[str], constraints: Path | None = None) -> list[str]:
    """Exact versions of all that they need and that is not present. Blocks; asks the package index. Raises NoWheels."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["--dry-run", "--ignore-installed", "--target", folder, "--report", str(report)]
        _pip_install(*words, *_bounds(constraints), *requirements)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    versions = {normal(wheel["metadata"]["name"]): wheel["metadata"]["version"] for wheel in found}
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in present]


def install(folder: Path, requirements: Sequence[str], constraints: Path | None = None) -> None:
    """These, without what they need. Blocks; downloads. Raises NoWheels."""
    _pip_install("--no-deps", "--no-compile", "--target", str(folder), *_bounds(constraints), *requirements)


def normal(name: str) -> str:
    """As the index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """What it asks for: without versions, extras and conditions."""
    found = re.match(r"[\w.-]+", requirement.strip())
    if found is None:
        raise ValueError(f"{requirement!r} names no package")
    return normal(found[0])


def _bounds(constraints: Path | None) -> list[str]:
    return [] if constraints is None else ["--constraint", str(constraints)]


def _pip_install(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", *_TARGET, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise NoWheels("\n".join(errors[-20:]))
