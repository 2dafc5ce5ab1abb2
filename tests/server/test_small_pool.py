"""A KV pool of a few hundred tokens: requests queue, every text is exact, nothing hangs, nothing is promised twice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.golden.golden_set import load_goldens
from tests.server.conftest import NUM_QUEUED, SMALL_CAPACITY_TOKENS
from tests.server.generate import cut_connections, golden_request, post, post_all
from tests.server.processes import wait_until
from tests.server.running_server import RunningServer


@pytest.fixture
def server(small_server: RunningServer) -> RunningServer:
    small_server.clear_faults()
    return small_server


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_requests", "num_tokens"), [(10, 121), pytest.param(16, 200, marks=pytest.mark.exhaustive)]
)
def test_more_requests_at_once_than_there_is_memory_for(
    server: RunningServer, num_requests: int, num_tokens: int
) -> None:
    """Each needs 8 (or 13) of 40 blocks, so five (three) run and the others queue. The first 64 tokens have a golden
    output; all must be what the same request gives alone."""
    goldens = [golden for golden in load_goldens() if 30 <= len(golden.prompt_ids) <= 57][:num_requests]
    assert len(goldens) == num_requests
    requests = [golden_request(golden, num_tokens - len(golden.prompt_ids)) for golden in goldens]
    answers = post_all(server, requests, num_at_once=num_requests)
    for golden, (answer,) in zip(goldens, answers, strict=True):
        golden.check(answer.token_ids[:64])
        assert len(answer.token_ids) == num_tokens - len(golden.prompt_ids)
        assert answer.finish_reason == "length"
    with server.client() as client:
        assert post(client, *requests[0]) == answers[0]
    server.wait_for_baseline()


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(server: RunningServer) -> None:
    with server.client() as client:
        started_s = time.monotonic()
        response = client.post("/v1/completions", json={"prompt": [5] * 300, "max_tokens": 200, "n": 3})
        elapsed_s = time.monotonic() - started_s
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "960" in message  # 18 shared blocks and 3 x 14 of their own, of 16 tokens
    assert str(SMALL_CAPACITY_TOKENS) in message
    assert elapsed_s < 60.0, "who waits for memory waits for 300 s"
    server.wait_for_baseline()


def test_beyond_the_queue_bound_requests_are_turned_away(server: RunningServer) -> None:
    """One runs, so many may wait: of ten more that come while nothing moves, nine are turned away at once."""
    num_requests = NUM_QUEUED + 10
    before = server.total("splitserve_request_rejections_total", reason="queue_full")
    body = {"prompt": [5] * 100, "max_tokens": 400, "temperature": 0}
    server.hold("decode.step")
    with server.client() as client, ThreadPoolExecutor(num_requests) as pool:
        futures = [pool.submit(client.post, "/v1/completions", json=body)]
        # Until everybody knows that it is admitted: one that is yet to be is one of those that wait.
        wait_until(lambda: _in_flight(server) == 1 and not server.total("splitserve_requests_queued"), 120.0)
        futures += [pool.submit(client.post, "/v1/completions", json=body) for _ in range(num_requests - 1)]
        wait_until(lambda: sum(future.done() for future in futures) >= 9, 120.0)
        time.sleep(1.0)  # nobody else is
        cut_connections(client)
        answers = [future.result() for future in futures if not isinstance(future.exception(), httpx.TransportError)]
    server.clear_faults()
    assert [answer.status_code for answer in answers] == [429] * 9
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert all(answer.json()["error"]["code"] == "queue_full" for answer in answers)
    assert server.total("splitserve_request_rejections_total", reason="queue_full") == before + 9
    server.wait_for_baseline()


def _in_flight(server: RunningServer) -> float:
    return server.total("splitserve_requests_in_flight", pool="decode")
