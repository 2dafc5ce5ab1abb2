"""A server in a process of its own: started, waited for, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

_STOP_TIMEOUT_S = 30.0
_ASK_EVERY_S = 0.1
_REFUSES_S = 3.0  # so long at most, from when it answers, but not that it is well


@contextmanager
def child_server(
    command: Sequence[str],
    url: str,
    log: Path,
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stops_by: signal.Signals = signal.SIGTERM,
) -> Iterator[str]:
    """The URL, from when it answers /health until the end. Blocks for timeout_s at most. Raises RuntimeError with the
    end of its log where it ends or does not answer. environment: all of it; None: this process's."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    try:
        _wait_until_it_answers(process, url, log, timeout_s)
        yield url
    finally:
        process.send_signal(stops_by)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    refuses = False
    while True:
        try:
            urlopen(f"{url}/health", timeout=2).close()
            return
        except (URLError, OSError) as error:
            if isinstance(error, HTTPError) and not refuses:
                refuses, deadline_s = True, min(deadline_s, time.monotonic() + _REFUSES_S)
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{error}: {log.read_text(errors='replace')[-3000:]}") from error
        time.sleep(_ASK_EVERY_S)
