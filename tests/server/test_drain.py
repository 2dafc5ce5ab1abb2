"""Replicas of a real server leave, freeze and are replaced under streams, and at last the server itself: no stream is
cut, each has transformers' text.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.golden.golden_set import Golden, load_goldens
from tests.server.generate import Completed, golden_request, stream
from tests.server.processes import cpu_ticks, redeploy, replicas, state_of, wait_until
from tests.server.running_server import RunningServer, run_server

NUM_STREAMS = 8
GOLDENS = load_goldens()[2::9][:NUM_STREAMS]
assert len(GOLDENS) == NUM_STREAMS
FROZEN_AFTER_S = 3.0
# Beside our own bound, what Ray and HTTP take on a machine with less cores than processes.
SLACK_S = 10.0

# About five minutes, and a server of its own: more than `make test` has room for.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes = {
        "ingress.replicas": 1,
        "lifecycle.frozen_after_s": FROZEN_AFTER_S,
        "lifecycle.restart_after_s": 120.0,
        "lifecycle.drain_timeout_s": 60.0,
        "routing.fallback_to_decode": False,
    }
    with run_server("local-2p2d.yaml", tmp_path_factory.mktemp("drain"), changes) as server:
        yield server


# -- what happens ----------------------------------------------------------------------------------


def test_a_frozen_decode_replicas_streams_go_on_at_the_other(server: RunningServer) -> None:
    with streams(server) as running:
        pid = busiest(server, "decode")
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            wait_until(lambda: state_of(pid) == "T", SLACK_S)
            wait_until(lambda: losses(server, "frozen") >= 1, FROZEN_AFTER_S + SLACK_S)
            print(f"frozen noticed after {time.monotonic() - began_s:.1f} s")
            check(running)
            assert httpx.get(f"{server.url}/health/ready").status_code == 200, "the other pair is usable"
        finally:
            os.kill(pid, signal.SIGCONT)
    server.wait_for_baseline()
    check_streams(server)


def test_every_decode_replica_frozen_is_not_ready_and_comes_back(server: RunningServer) -> None:
    wait_until(lambda: ready(server), 120.0)
    pids = replicas(server, "decode")
    assert len(pids) == 2
    with streams(server) as running:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: not ready(server), FROZEN_AFTER_S + SLACK_S)
            answer = httpx.get(f"{server.url}/health/ready").json()
            assert answer["missing_pools"] == ["decode"]
            body = {"prompt": "hi", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 503
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        check(running)
    wait_until(lambda: ready(server), 120.0)
    assert replicas(server, "decode") == pids, "nobody was replaced"


@pytest.mark.parametrize("pool", ["decode", "prefill"])
def test_sigterm_of_a_replica_drains_and_replaces_it(server: RunningServer, pool: str) -> None:
    before = replicas(server, pool)
    with streams(server) as running:
        pid = busiest(server, "decode") if pool == "decode" else before[0]
        os.kill(pid, signal.SIGTERM)
        check(running)
    check_streams(server)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 120.0)
    wait_until(lambda: len(replicas(server, pool)) == 2 and ready(server), 120.0)
    assert "SIGTERM: draining" in server.log()


@pytest.mark.parametrize("pool", ["decode", "prefill"])
def test_a_killed_replica_is_noticed_at_once_and_replaced(server: RunningServer, pool: str) -> None:
    before, dead = replicas(server, pool), losses(server, "dead")
    with streams(server) as running:
        pid = busiest(server, "decode") if pool == "decode" else before[0]
        os.kill(pid, signal.SIGKILL)
        if pool == "decode":  # calls are open there, at prefill there are none: Ray tells of it
            wait_until(lambda: losses(server, "dead") == dead + 1, SLACK_S)
        check(running)
    check_streams(server)
    wait_until(lambda: len(set(replicas(server, pool)) - {pid}) == 2 and ready(server), 120.0)
    check_streams(server)
    server.wait_for_baseline()


def test_a_rolling_update_of_one_pool_cuts_nothing(server: RunningServer) -> None:
    old, others = set(replicas(server, "prefill")), replicas(server, "decode")
    redeploy(server, "--roll", "prefill")
    deadline_s = time.monotonic() + 240.0
    while old & set(replicas(server, "prefill")):
        assert time.monotonic() < deadline_s, "not in time"
        check_streams(server)
    wait_until(lambda: len(replicas(server, "prefill")) == 2, 120.0)
    assert replicas(server, "decode") == others, "the other pool was left alone"


def test_scale_down_cuts_nothing(server: RunningServer) -> None:
    old = set(replicas(server, "decode"))
    with streams(server) as running:
        scaling = ThreadPoolExecutor(1).submit(redeploy, server, "--scale", "decode=1")
        check(running)
        while not scaling.done() or len(replicas(server, "decode")) > 1:
            check_streams(server)
        scaling.result()
    assert set(replicas(server, "decode")) < old, "one of those that ran goes on"
    check_streams(server)
    assert server.total("splitserve_requests_total", outcome="server_error") == 0


def test_sigterm_of_the_server_ends_streams_first(server: RunningServer) -> None:
    """The last test: the server is gone then."""
    with streams(server) as running:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not ready(server), 120.0)
        body = {"prompt": "hi", "max_tokens": 2}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        check(running)
    assert server.process.wait(120) == 0


# -- streams ---------------------------------------------------------------------------------------


@contextmanager
def streams(server: RunningServer) -> Iterator[list[tuple[Golden, Future[list[Completed]]]]]:
    """Eight golden prompts, each a stream of its own, that have all begun."""
    num_before = server.total(_FIRST_TOKENS)
    with server.client(120.0) as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [(golden, pool.submit(stream, client, *golden_request(golden))) for golden in GOLDENS]
        wait_until(lambda: server.total(_FIRST_TOKENS) >= num_before + NUM_STREAMS, 120.0)
        yield running


_FIRST_TOKENS = "splitserve_time_to_first_token_seconds_count"


def check(running: list[tuple[Golden, Future[list[Completed]]]]) -> None:
    """All of them have ended, whole and right. A near tie of the reference may go either way."""
    for golden, future in running:
        (answer,) = future.result(120)
        if golden.check(answer.token_ids) is None:
            assert answer.text == golden.text, golden.name
        assert answer.finish_reason == "length"


def check_streams(server: RunningServer) -> None:
    """A round of streams, to the end."""
    with streams(server) as running:
        check(running)


# -- what there is ---------------------------------------------------------------------------------


def busiest(server: RunningServer, pool: str) -> int:
    """The replica that does most now."""
    pids = replicas(server, pool)
    before = [cpu_ticks(pid) for pid in pids]
    time.sleep(0.2)
    return max(zip(pids, before, strict=True), key=lambda item: cpu_ticks(item[0]) - item[1])[0]


def ready(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health/ready", timeout=120).status_code == 200


def losses(server: RunningServer, reason: str) -> float:
    return server.total("splitserve_replica_losses_total", reason=reason)
