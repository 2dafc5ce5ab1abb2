"""The file that takes what is said around the terminal: by Ray, Serve, NIXL and UCX, and by replicas."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

_MAX_BYTES = 64 * 1024**2


class LogFile:
    """One file, and the one before it, which ends in .1. Any thread may write."""

    def __init__(self, path: Path, max_bytes: int = _MAX_BYTES) -> None:
        """What lies there already becomes the one before. Raises OSError if it can't be written."""
        self.path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._takes_descriptors = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._begin()

    def write(self, line: str) -> None:
        """A whole line, without its end. What can't be written (a full disk) is lost: it stops no server."""
        with self._lock:
            try:
                self._file.write(f"{line}\n".encode(errors="backslashreplace"))
                if self._file.tell() >= self._max_bytes:
                    before, self._file = self._file, self._begin()  # where that fails this one stays, until it can
                    before.close()
                    self._take_descriptors()
            except (OSError, ValueError):
                return

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def instead_of_the_terminal(self) -> Iterator[tuple[TextIO, TextIO]]:
        """Within it whatever this process and its children write to descriptors 1 and 2 goes into the file; yields what
        writes to stdout and stderr as they were. Main thread."""
        flush_streams()
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        streams = [os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace") for descriptor in kept]
        with self._lock:
            self._takes_descriptors = True
            self._take_descriptors()
        try:
            yield streams[0], streams[1]
        finally:
            with self._lock:
                self._takes_descriptors = False
            flush_streams()
            for descriptor, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream.fileno(), descriptor)
                stream.close()

    def _take_descriptors(self) -> None:
        if self._takes_descriptors:
            for descriptor in (1, 2):
                os.dup2(self._file.fileno(), descriptor)

    def _begin(self) -> IO[bytes]:
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        # Whoever may look at the machine need not see who asked what.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "ab", buffering=0)


def flush_streams() -> None:
    """What was printed has then been handed over."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
