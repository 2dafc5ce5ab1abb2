"""Faults that are no process's own: a log that can't be written, clients that don't read, a scraper."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx

from tests.chaos.faults import POOLS, Fault, Injected
from tests.server.processes import replicas, wait_until
from tests.server.running_server import RunningServer

_RECEIVE_BYTES = 4096  # of a client's own buffer
_LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}


def full_disk(for_s: float) -> Fault:
    """Nothing more can be written to a file by the command, which writes the log, nor by any replica."""

    def inject(server: RunningServer) -> Injected:
        pids = [server.process.pid, *(pid for pool in POOLS for pid in replicas(server, pool))]
        at_s = time.monotonic()
        with _largest_file(pids, 0):
            size = server.replica_log.stat().st_size
            asked = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
            assert asked.status_code == 200, asked.text
            time.sleep(for_s)
            assert server.replica_log.stat().st_size == size, "the log was written"
        wait_until(lambda: server.replica_log.stat().st_size > size, 60.0)
        return Injected(at_s, f"the log of {len(pids)} processes stood still for {for_s:g} s")

    return inject


@contextmanager
def _largest_file(pids: list[int], num_bytes: int) -> Iterator[None]:
    """Python ignores the signal of such a write, which then fails as on a full disk."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    try:
        for pid, (_, hard) in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def unread(num: int, for_s: float) -> Fault:
    """So many streams of which their clients read nothing; then they go."""

    def inject(server: RunningServer) -> Injected:
        at_s = time.monotonic()
        with ExitStack() as stack:
            links = [stack.enter_context(_asked(server)) for _ in range(num)]
            wait_until(lambda: all(_num_waiting(link) > 0 for link in links), 120.0)
            time.sleep(for_s)
            waiting = [_num_waiting(link) for link in links]
        return Injected(at_s, f"{min(waiting)} to {max(waiting)} bytes waited for each of {num} clients")

    return inject


def _asked(server: RunningServer) -> socket.socket:
    address, body = urlsplit(server.url), json.dumps(_LONG).encode()
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    link.connect((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    link.sendall(f"{head}\r\n\r\n".encode() + body)
    return link


def _num_waiting(link: socket.socket) -> int:
    """Bytes that have come and were not read."""
    (num,) = struct.unpack("i", fcntl.ioctl(link, termios.FIONREAD, b"\0" * 4))
    return int(num)


def scraped(times_a_second: float, for_s: float) -> Fault:
    """/metrics, asked without a pause by somebody."""

    def inject(server: RunningServer) -> Injected:
        at_s, num_answered = time.monotonic(), 0
        with server.client(60.0) as client:
            while time.monotonic() < at_s + for_s:
                assert client.get("/metrics").status_code == 200
                num_answered += 1
                time.sleep(1.0 / times_a_second)
        return Injected(at_s, f"/metrics answered {num_answered} times in {for_s:g} s")

    return inject
