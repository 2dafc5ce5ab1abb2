"""Pools whose replicas may do each other's work (`routing.policy: roles_by_cost`), on a real server: texts are those of
transformers, both replicas do both, and either may be killed.

Neither replica has room for more than two of the streams that are open, and prompts for others: so both generate.
"""

from __future__ import annotations

import time

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.conftest import OneServer
from tests.server.generate import golden_request, post_all
from tests.server.processes import kill, replicas, wait_until
from tests.server.running_server import RunningServer
from tests.server.steady_streams import steady_streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GOLDENS = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 40][:8]
NUM_CLIENTS = 4
NUM_TOKENS = 16
POOLS = ("prefill", "decode")
PATIENCE_S = 300.0  # a replica starts in 20 s, on a machine with much else to do in 100


@pytest.fixture
def server(one_server: OneServer) -> RunningServer:
    changes: dict[str, object] = {"routing.policy": "roles_by_cost", "slo.ttft_s": 0.4, "slo.tpot_s": 0.05}
    changes |= {"model.max_model_len": 512, "limits.max_choices": 2, "ingress.queue_timeout_s": PATIENCE_S}
    for pool in POOLS:
        sizes = {"may_also": True, "kv_capacity_tokens": 4096, "max_running_sequences": 3, "max_batch_tokens": 256}
        changes |= {f"pools.{pool}.{key}": value for key, value in sizes.items()}
    return one_server.get("roles", "local.yaml", changes)


def num_streams(server: RunningServer, pool: str) -> float:
    """Given to replicas of that pool, so far."""
    return server.total("splitserve_router_roles_total", of_pool=pool, role="decode")


def test_texts_are_those_of_transformers_and_both_pools_do_both(server: RunningServer) -> None:
    answers = post_all(server, [golden_request(golden) for golden in GOLDENS], num_at_once=len(GOLDENS))
    for golden, (answer,) in zip(GOLDENS, answers, strict=True):
        golden.check(answer.token_ids)
        assert answer.finish_reason == "length"
    server.wait_for_baseline()
    for pool in POOLS:
        assert num_streams(server, pool) > 0
    mixed = server.total("splitserve_router_decisions_total", result="local_mixed")
    assert mixed > 0, "no prompt was computed where its tokens are"


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_replica_of_either_pool_costs_no_stream(server: RunningServer, pool: str) -> None:
    (dead,) = replicas(server, pool)
    with steady_streams(server, GOLDENS, NUM_CLIENTS, NUM_TOKENS) as streams:
        wait_until(lambda: len(streams.ended) >= NUM_CLIENTS, PATIENCE_S)
        before = server.total("splitserve_retries_total")
        wait_until(lambda: num_running(server, pool) > 0, PATIENCE_S)
        kill(dead)
        killed_s = time.monotonic()
        # While it is away the other one does everything.
        wait_until(lambda: len(streams.after(killed_s)) >= NUM_CLIENTS, PATIENCE_S)
        wait_until(lambda: len(set(replicas(server, pool)) - {dead}) == 1, PATIENCE_S)
        generated = num_streams(server, pool)
        wait_until(lambda: num_streams(server, pool) > generated, PATIENCE_S)  # the new one does its part
    assert streams.during(killed_s)
    assert server.total("splitserve_retries_total") > before, "nothing was lost with it"
    assert (streams.failed, streams.wrong) == ([], [])
    server.wait_for_baseline()


def num_running(server: RunningServer, pool: str) -> float:
    """Requests at replicas of that pool now."""
    return server.total("splitserve_requests_in_flight", pool=pool)
