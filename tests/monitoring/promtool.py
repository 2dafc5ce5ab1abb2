"""Prometheus' own checker. Without it its tests are skipped: `apt-get install prometheus` brings it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def promtool(*arguments: str, stdin: bytes | None = None) -> str:
    """What it says; the test fails when it finds fault."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said
