"""A burst that orders a replica, with a real start: everybody waits for it, and it serves its part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.golden.golden_set import Golden, load_goldens
from tests.server.generate import golden_request, post, stream
from tests.server.processes import wait_until
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

GOLDENS = [golden for golden in load_goldens() if 20 <= len(golden.prompt_ids) <= 60]
NUM_REQUESTS, NUM_TOKENS = 8, 130  # one of them fits into a replica at a time
START_S = 1300.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes: dict[str, Any] = {
        "model.max_model_len": 256,
        "pools.prefill.autoscaling": None,
        "pools.decode.autoscaling.min_replicas": 1,
        "pools.decode.autoscaling.max_replicas": 2,
        "pools.decode.autoscaling.upscale_delay_s": 0.0,
        "pools.decode.autoscaling.downscale_delay_s": 3600.0,  # to be looked at
        "pools.decode.autoscaling.expected_start_s": 400.0,  # this machine may have much else to do
        "pools.decode.kv_capacity_tokens": 256,
        "ingress.queue_timeout_s": 20.0,  # until the replica is ordered, which takes a second or two
        "ingress.cold_start_timeout_s": START_S,
        "ingress.request_timeout_s": 1400.0,
        "transfer.handoff_timeout_s": 300.0,
    }
    with run_server("local-autoscaling.yaml", tmp_path_factory.mktemp("bursts"), changes) as server:
        yield server


def by_replica(server: RunningServer, name: str) -> dict[str, float]:
    """Of decode, by replica."""
    samples = server.metrics()
    return {labels["replica"]: v for n, labels, v in samples if n == name and labels.get("pool") == "decode"}


def test_a_burst_that_orders_a_replica_is_served_by_it(server: RunningServer) -> None:
    assert len(by_replica(server, "splitserve_build_info")) == 1

    def ask(number: int) -> float:
        """Fails unless the answer is whole and right; when it was there."""
        golden: Golden = GOLDENS[number]
        with server.client(timeout_s=1500.0) as client:
            send = stream if number % 2 else post
            (answer,) = send(client, *golden_request(golden, NUM_TOKENS))
        golden.check(answer.token_ids[:64])
        assert (len(answer.token_ids), answer.finish_reason) == (NUM_TOKENS, "length")
        return time.monotonic()

    began_s = time.monotonic()
    server.hold("decode.step")  # nobody is through before the other one is there
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [pool.submit(ask, number) for number in range(NUM_REQUESTS)]
        try:
            wait_until(lambda: len(by_replica(server, "splitserve_build_info")) == 2, START_S)
        finally:
            server.clear_faults()
        ended_s = sorted(future.result() - began_s for future in asked)
    print(f"ended after {', '.join(f'{at_s:.1f}' for at_s in ended_s)} s")
    served = by_replica(server, "splitserve_step_seconds_count")
    print(f"steps by replica: {served}; {server.total('splitserve_queue_moves_total'):.0f} moved")
    assert len(by_replica(server, "splitserve_build_info")) == 2
    assert len(served) == 2
    assert min(served.values()) > NUM_TOKENS
    assert server.total("splitserve_queue_moves_total") >= 1
    assert server.total("splitserve_requests_total", outcome="ok") == NUM_REQUESTS
    assert server.total("splitserve_requests_total") == NUM_REQUESTS
    assert server.total("splitserve_replicas_ordered") == 0
    assert 0 < server.total("splitserve_replica_start_seconds", pool="decode") != 400.0
    server.wait_for_baseline()
