"""SIGKILL of what is not ours, or not an engine's: Serve's controller, an ingress, Serve's proxy, under greedy streams.

What need not end goes on with the same text; what must end says so, if anybody is left to say it; and soon all is as
before. HAProxy: tests/server/test_haproxy.py. Engines' replicas: tests/server/test_drain.py. In this order: that each
is repaired shows that the new controller works.
"""

from __future__ import annotations

import time

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.conftest import OneServer
from tests.server.processes import CONTROLLER, PROXY, is_ready, kill, processes, redeploy, replicas, the_one, wait_until
from tests.server.running_server import RunningServer
from tests.server.steady_streams import held_open, steady_streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GOLDENS = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 40][:4]
NUM_CLIENTS = 3
NUM_TOKENS = 32
POOLS = ("ingress", "prefill", "decode")
# A second or so each where cores are free.
PATIENCE_S = 240.0
# Until everybody knows that an ingress has gone: a moment, or as long as this machine stands still.
KNOWN_AFTER_S = 15.0


@pytest.fixture
def server(one_server: OneServer) -> RunningServer:
    return one_server.get("2p2d", "local-2p2d.yaml")  # as tests/server/test_layouts.py has it, which comes next


def all_replicas(server: RunningServer) -> dict[str, list[int]]:
    return {pool: replicas(server, pool) for pool in POOLS}


def kill_controller(server: RunningServer) -> float:
    """Returns when it was killed, once another one is there."""
    old = the_one(server, CONTROLLER)
    killed_s = time.monotonic()
    kill(old)
    wait_until(lambda: len(set(processes(server, CONTROLLER)) - {old}) == 1, PATIENCE_S)
    print(f"another controller after {time.monotonic() - killed_s:.1f} s")
    return killed_s


def each_ingress_has_some(server: RunningServer) -> bool:
    """Of the streams that are open."""
    name = "splitserve_requests_in_flight"
    open_at = [value for found, labels, value in server.metrics() if found == name and labels["pool"] == "ingress"]
    return len(open_at) == 2 and min(open_at) > 0


def wait_for_replacement(server: RunningServer, pool: str, dead: int) -> None:
    wait_until(lambda: dead not in replicas(server, pool) and len(replicas(server, pool)) == 2, PATIENCE_S)


def test_nobody_notices_that_serves_controller_is_killed(server: RunningServer) -> None:
    before = all_replicas(server)
    assert {pool: len(pids) for pool, pids in before.items()} == dict.fromkeys(POOLS, 2)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        wait_until(lambda: len(streams.ended) >= NUM_CLIENTS, PATIENCE_S)
        killed_s = kill_controller(server)
        back_s = time.monotonic()
        # It asks every replica then; who can't answer is stopped.
        wait_until(lambda: len(streams.after(back_s + 3.0)) >= NUM_CLIENTS, PATIENCE_S)
        assert is_ready(server)
    assert streams.during(killed_s)
    assert streams.failed == []
    assert streams.wrong == []
    assert all_replicas(server) == before


def test_an_ingress_that_is_killed_fails_its_own_requests_only_and_says_so(server: RunningServer) -> None:
    before = all_replicas(server)
    with steady_streams(server, GOLDENS, 2 * NUM_CLIENTS, NUM_TOKENS) as streams:
        wait_until(lambda: len(streams.ended) >= NUM_CLIENTS, PATIENCE_S)
        with held_open(streams, 2 * NUM_CLIENTS, lambda: each_ingress_has_some(server)):
            killed_s = time.monotonic()
            kill(before["ingress"][0])
        wait_for_replacement(server, "ingress", before["ingress"][0])
        there_s = time.monotonic()
        wait_until(lambda: len(streams.after(there_s)) >= NUM_CLIENTS, PATIENCE_S)
    failed = streams.failed
    assert 1 <= len([ended for ended in failed if ended.began_s < killed_s]) < 2 * NUM_CLIENTS, failed
    assert all(ended.began_s < killed_s + KNOWN_AFTER_S and "ingress_lost" in str(ended.error) for ended in failed)
    assert streams.wrong == []
    after = all_replicas(server)
    assert (after["prefill"], after["decode"]) == (before["prefill"], before["decode"])
    server.wait_for_baseline()


def test_serves_proxy_killed_cuts_what_is_open_and_is_back_in_seconds(server: RunningServer) -> None:
    before, old = all_replicas(server), the_one(server, PROXY)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        wait_until(lambda: len(streams.ended) >= NUM_CLIENTS, PATIENCE_S)
        with held_open(streams, NUM_CLIENTS):
            killed_s = time.monotonic()
            kill(old)
        wait_until(lambda: is_ready(server), PATIENCE_S)
        back_s = time.monotonic()
        print(f"the proxy is back after {back_s - killed_s:.1f} s")
        wait_until(lambda: len(streams.after(back_s)) >= NUM_CLIENTS, PATIENCE_S)
    cut = streams.during(killed_s)
    assert len(cut) == NUM_CLIENTS
    kinds = {str(ended.error).partition(":")[0] for ended in cut}
    assert kinds <= {"RemoteProtocolError", "ReadError"}, cut
    assert [ended for ended in streams.failed if ended.began_s > back_s] == []
    assert streams.wrong == []
    assert the_one(server, PROXY) != old
    assert all_replicas(server) == before
    server.wait_for_baseline()


@pytest.mark.exhaustive
def test_a_new_controller_replaces_a_decode_replica_under_streams(server: RunningServer) -> None:
    before = all_replicas(server)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        kill_controller(server)
        kill(before["decode"][0])
        wait_for_replacement(server, "decode", before["decode"][0])
        wait_until(lambda: is_ready(server), PATIENCE_S)
        there_s = time.monotonic()
        wait_until(lambda: len(streams.after(there_s)) >= NUM_CLIENTS, PATIENCE_S)
    assert (streams.failed, streams.wrong) == ([], [])
    after = all_replicas(server)
    assert (after["ingress"], after["prefill"]) == (before["ingress"], before["prefill"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_the_controller_and_all_of_a_pool_killed_together_come_back(server: RunningServer, pool: str) -> None:
    dead = replicas(server, pool)
    for pid in dead:
        kill(pid)
    kill_controller(server)
    wait_until(lambda: len(set(replicas(server, pool)) - set(dead)) == 2 and is_ready(server), PATIENCE_S)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        wait_until(lambda: len(streams.ended) >= 2 * NUM_CLIENTS, PATIENCE_S)
    assert (streams.failed, streams.wrong) == ([], [])


@pytest.mark.exhaustive
def test_a_new_controller_scales_and_updates(server: RunningServer) -> None:
    before = all_replicas(server)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        kill_controller(server)
        redeploy(server, "--scale", "decode=1")
        wait_until(lambda: len(replicas(server, "decode")) == 1, PATIENCE_S)
        kill_controller(server)
        redeploy(server, "--scale", "decode=2", "--roll", "prefill")
        wait_until(
            lambda: (
                len(replicas(server, "decode")) == 2 and not set(replicas(server, "prefill")) & set(before["prefill"])
            ),
            2 * PATIENCE_S,
        )
        wait_until(lambda: len(replicas(server, "prefill")) == 2, PATIENCE_S)
    assert (streams.failed, streams.wrong) == ([], [])
    assert replicas(server, "ingress") == before["ingress"]
