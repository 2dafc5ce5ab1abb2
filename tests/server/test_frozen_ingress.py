"""SIGSTOP of one of two ingresses with streams open: its own end with an error once Serve has given it up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.processes import is_ready, replicas, state_of, wait_until
from tests.server.running_server import RunningServer, run_server
from tests.server.steady_streams import steady_streams

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

GOLDENS = load_goldens()[:6]
NUM_CLIENTS = 6
DRAIN_TIMEOUT_S = 10.0
# Three health checks of 10 s, 2 s between; and what a machine adds that has other things to do.
GIVEN_UP_S = 34.0
SLACK_S = 60.0


@pytest.fixture(scope="module", params=["serve", "haproxy"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes = {
        "ingress.replicas": 2,
        "server.proxy": request.param,
        "lifecycle.drain_timeout_s": DRAIN_TIMEOUT_S,
        "pools.decode.num_threads": 1,
    }
    with run_server("colocated.yaml", tmp_path_factory.mktemp("frozen"), changes) as server:
        yield server


def test_requests_of_a_frozen_ingress_end(server: RunningServer) -> None:
    pid = replicas(server, "ingress")[0]
    with steady_streams(server, GOLDENS, NUM_CLIENTS, max_tokens=64) as streams:
        wait_until(lambda: len(streams.ended) >= 2, 120.0)
        os.kill(pid, signal.SIGSTOP)
        frozen_s = time.monotonic()
        wait_until(lambda: state_of(pid) == "T", 120.0)
        try:
            wait_until(lambda: len(streams.failed) > 0, GIVEN_UP_S + DRAIN_TIMEOUT_S + SLACK_S)
            print(f"the first ended after {time.monotonic() - frozen_s:.1f} s")
            wait_until(lambda: state_of(pid) == "", SLACK_S)
        finally:
            if state_of(pid) == "T":  # only if the test failed
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(replicas(server, "ingress")) == 2 and is_ready(server), SLACK_S)
        there_s = time.monotonic()
        wait_until(lambda: len(streams.after(there_s)) >= NUM_CLIENTS, 120.0)
    assert all(ended.ended_s > frozen_s + DRAIN_TIMEOUT_S for ended in streams.failed), "nothing ends before"
    assert max(ended.ended_s for ended in streams.failed) < frozen_s + GIVEN_UP_S + DRAIN_TIMEOUT_S + SLACK_S
    assert len(streams.failed) <= NUM_CLIENTS
    assert streams.wrong == []
    server.wait_for_baseline()
