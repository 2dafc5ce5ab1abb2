"""A KV pool of a few hundred tokens: requests queue, every text is exact, nothing hangs, nothing is promised twice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.generate import golden_request, post, post_all
from tests.server.running_server import RunningServer, run_server

CAPACITY_TOKENS = 640


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes = {
        "model.max_model_len": 512,
        "pools.decode.kv_capacity_tokens": CAPACITY_TOKENS,
        "pools.prefill.kv_capacity_tokens": 512,
        "ingress.queue_timeout_s": 300.0,
        "ingress.max_queued_requests": 14,
    }
    with run_server("local.yaml", tmp_path_factory.mktemp("small"), changes) as server:
        yield server


@pytest.mark.timeout(600)
def test_sixteen_requests_of_two_hundred_tokens(server: RunningServer) -> None:
    """Each needs 13 of 40 blocks, so three run and the others queue. The first 64 tokens have a golden output; all
    200 must be what the same request gives alone."""
    goldens = [golden for golden in load_goldens() if 30 <= len(golden.prompt_ids) <= 57][:16]
    assert len(goldens) == 16
    requests = [golden_request(golden, 200 - len(golden.prompt_ids)) for golden in goldens]
    answers = post_all(server, requests, num_at_once=16)
    for golden, (answer,) in zip(goldens, answers, strict=True):
        golden.check(answer.token_ids[:64])
        assert len(answer.token_ids) == 200 - len(golden.prompt_ids)
        assert answer.finish_reason == "length"
    with server.client() as client:
        for request, together in list(zip(requests, answers, strict=True))[:2]:
            assert post(client, *request) == together
    server.wait_for_baseline()


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(server: RunningServer) -> None:
    with server.client() as client:
        started_s = time.monotonic()
        response = client.post("/v1/completions", json={"prompt": [5] * 300, "max_tokens": 200, "n": 3})
        elapsed_s = time.monotonic() - started_s
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "1008" in message  # 18 shared blocks and 3 x 15 of their own, of 16 tokens
    assert str(CAPACITY_TOKENS) in message
    assert elapsed_s < 2.0
    server.wait_for_baseline()


def test_beyond_the_queue_bound_requests_are_turned_away(server: RunningServer) -> None:
    server.hold("decode.step")
    try:
        with server.client() as client:
            import concurrent.futures

            body = {"prompt": [5] * 100, "max_tokens": 400, "temperature": 0}
            with concurrent.futures.ThreadPoolExecutor(24) as pool:
                waiting = [pool.submit(client.post, "/v1/completions", json=body, timeout=15) for _ in range(24)]
                rejected = []
                for future in concurrent.futures.as_completed(waiting):
                    if future.exception() is None:
                        rejected.append(future.result())
                        if len(rejected) >= 5:
                            break
                server.clear_faults()
    finally:
        server.clear_faults()
    assert {response.status_code for response in rejected} == {429}
    assert all(int(response.headers["retry-after"]) >= 1 for response in rejected)
    assert server.total("splitserve_request_rejections_total", reason="queue_full") >= 5
    server.wait_for_baseline(timeout_s=5)
