"""Replicas of a real server leave while long streams run there: they are gone in seconds, and no stream is cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.golden.golden_set import Golden, load_goldens
from tests.server.generate import Completed, golden_request, stream
from tests.server.processes import redeploy, replicas, wait_until
from tests.server.running_server import RunningServer, run_server

NUM_STREAMS = 32
NUM_TOKENS = 500
GOLDENS = (load_goldens()[::7] * 4)[:NUM_STREAMS]
GONE_S = 10.0  # on a machine that has nothing else to do: 6 s there, most of it until Serve has noticed
PATIENCE_S = 1500.0  # the streams of one replica on a core that others use, too

# Minutes, and a server of its own.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes = {
        "ingress.replicas": 1,
        "pools.prefill.replicas": 1,
        "pools.decode.kv_capacity_tokens": 24576,
        "pools.decode.max_running_sequences": 64,
        "lifecycle.drain_timeout_s": 120.0,
        "ingress.request_timeout_s": PATIENCE_S,
        "lifecycle.frozen_after_s": 60.0,
        "lifecycle.restart_after_s": 120.0,
    }
    with run_server("local-2p2d.yaml", tmp_path_factory.mktemp("migration"), changes) as server:
        yield server


def test_sigterm_of_a_decode_replica_has_it_gone_in_seconds(server: RunningServer) -> None:
    """Where the machine stood still another one is told to go: a wait for its streams would be there again."""
    gone_s = [_gone_after(server)]
    while gone_s[-1] >= GONE_S and len(gone_s) < 3:
        gone_s.append(_gone_after(server))
    assert gone_s[-1] < GONE_S, gone_s


def _gone_after(server: RunningServer) -> float:
    """Seconds from SIGTERM until a replica has gone; its streams go on, and another one comes."""
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    before, num_moves = replicas(server, "decode"), moves(server, "moved")
    with streams(server) as running:
        pid = before[0]
        began_s = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 120.0)
        gone_s = time.monotonic() - began_s
        num_ended = sum(future.done() for _, future in running)
        pauses = [server.total(f"splitserve_migration_seconds_{what}") for what in ("sum", "count")]
        print(f"gone after {gone_s:.1f} s; {num_ended} streams had ended; pause {pauses[0] / pauses[1]:.2f} s")
        check(running)
    assert num_ended < NUM_STREAMS / 2, "most had much to go"
    assert moves(server, "moved") > num_moves + 4
    assert not moves(server, "lost")
    assert server.total("splitserve_retries_total") == 0
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    server.wait_for_baseline()
    return gone_s


def test_a_rolling_update_of_decode_cuts_nothing(server: RunningServer) -> None:
    """One after the other: what has moved once moves again, to the new one."""
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    old, num_moves = set(replicas(server, "decode")), moves(server, "moved")
    with streams(server) as running:
        redeploy(server, "--roll", "decode")
        check(running)
        wait_until(lambda: not old & set(replicas(server, "decode")), 600.0)
    assert moves(server, "moved") > num_moves
    assert server.total("splitserve_requests_total", outcome="server_error") == 0
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    server.wait_for_baseline()


def test_scale_down_has_one_gone_in_seconds(server: RunningServer) -> None:
    wait_until(lambda: len(replicas(server, "decode")) == 2, 120.0)
    before, num_moves = replicas(server, "decode"), moves(server, "moved")
    with streams(server) as running:
        redeploy(server, "--scale", "decode=1")
        began_s = time.monotonic()
        wait_until(lambda: len(set(before) & set(replicas(server, "decode"))) == 1, 60.0)
        print(f"gone after {time.monotonic() - began_s:.1f} s")
        num_ended = sum(future.done() for _, future in running)
        check(running)
    assert num_ended < NUM_STREAMS / 2, "most had much to go"
    assert moves(server, "moved") > num_moves
    assert not moves(server, "lost")


def moves(server: RunningServer, outcome: str) -> float:
    return server.total("splitserve_migrations_total", outcome=outcome)


@contextmanager
def streams(server: RunningServer) -> Iterator[list[tuple[Golden, Future[list[Completed]]]]]:
    """Long ones that have all begun."""
    num_before = server.total(_FIRST_TOKENS)
    with server.client(PATIENCE_S) as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [(golden, pool.submit(stream, client, *golden_request(golden, NUM_TOKENS))) for golden in GOLDENS]
        wait_until(lambda: server.total(_FIRST_TOKENS) >= num_before + NUM_STREAMS, 120.0)
        yield running


_FIRST_TOKENS = "splitserve_time_to_first_token_seconds_count"


def check(running: list[tuple[Golden, Future[list[Completed]]]]) -> None:
    """All are whole, and begin as transformers' texts do. A near tie of the reference may go either way."""
    for golden, future in running:
        (answer,) = future.result(PATIENCE_S)
        golden.check(answer.token_ids[: len(golden.output_ids)])
        assert len(answer.token_ids) == NUM_TOKENS
        assert answer.finish_reason == "length"
