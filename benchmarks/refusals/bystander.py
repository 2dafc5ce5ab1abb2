"""Somebody else's requests, in a process of their own: `python -m benchmarks.refusals.bystander URL SECONDS` prints
what they took, in ms, as JSON."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

_PERIOD_S = 0.1
_TOKENIZE = json.dumps({"prompt": "How long does this take?"})
_STREAM = json.dumps(
    {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
)
_HEADERS = {"Content-Type": "application/json"}


def _ask(connection: http.client.HTTPConnection, method: str, path: str, body: str | None) -> float:
    started_s = time.perf_counter()
    connection.request(method, path, body, _HEADERS if body else {})
    response = connection.getresponse()
    response.read()
    if response.status != 200:
        raise RuntimeError(f"{path} answered {response.status}")
    return 1000 * (time.perf_counter() - started_s)


def _poll(host: str, method: str, path: str, body: str | None, end_s: float, times_ms: list[float]) -> None:
    """At 10 Hz, later only when an answer takes longer than that."""
    connection = http.client.HTTPConnection(host, timeout=60)
    while time.monotonic() < end_s:
        next_s = time.monotonic() + _PERIOD_S
        times_ms.append(_ask(connection, method, path, body))
        time.sleep(max(0.0, next_s - time.monotonic()))
    connection.close()


def _stream(host: str, end_s: float, gaps_ms: list[float]) -> None:
    """Gaps between events of one stream, after the first; the client goes before its end."""
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", "/v1/completions", _STREAM, _HEADERS)
    response = connection.getresponse()
    last_s: float | None = None
    while time.monotonic() < end_s and (line := response.readline()):
        if line.startswith(b"data: {"):
            now_s = time.perf_counter()
            if last_s is not None:
                gaps_ms.append(1000 * (now_s - last_s))
            last_s = now_s
    connection.close()


def main(url: str, seconds: str) -> int:
    host, end_s = urlsplit(url).netloc, time.monotonic() + float(seconds)
    times_ms: dict[str, list[float]] = {"health": [], "tokenize": [], "stream": []}
    threads = [
        threading.Thread(target=_poll, args=(host, "GET", "/health", None, end_s, times_ms["health"])),
        threading.Thread(target=_poll, args=(host, "POST", "/tokenize", _TOKENIZE, end_s, times_ms["tokenize"])),
        threading.Thread(target=_stream, args=(host, end_s, times_ms["stream"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(times_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
