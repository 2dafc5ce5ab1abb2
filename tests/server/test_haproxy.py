"""The same server with HAProxy in front of its ingresses: answers, steering headers, clients that go, the end."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.golden.golden_set import load_goldens
from tests.server.conftest import OneServer
from tests.server.generate import golden_request, post_all
from tests.server.processes import CONTROLLER, is_ready, kill, processes, programs, replicas, the_one, wait_until
from tests.server.running_server import RunningServer
from tests.server.steady_streams import held_open, steady_streams
from tests.server.test_client_gone import PHASES, Client, wait_for

pytestmark = pytest.mark.slow
GOLDENS = load_goldens()
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(one_server: OneServer) -> RunningServer:
    # Whatever is measured of the machine, prompts are handed over: a phase of that is held.
    return one_server.get("haproxy", "local.yaml", {"server.proxy": "haproxy", "routing.local_by_cost": False})


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def haproxy_config(server: RunningServer) -> list[str]:
    port = server.url.rpartition(":")[2]
    texts = [path.read_text() for path in Path(tempfile.gettempdir()).glob("splitserve-*/*/haproxy.cfg")]
    (text,) = [text for text in texts if f"bind 127.0.0.1:{port}\n" in text]
    return text.splitlines()


def test_it_is_haproxy_that_answers(server: RunningServer) -> None:
    """Its statistics name the ingress, and say that requests went to it. They are for this machine only."""
    assert httpx.get(f"{server.url}/health").status_code == 200
    lines = haproxy_config(server)
    port = next(line for line in lines[lines.index("listen stats") :] if "bind" in line).rpartition(":")[2]
    table = httpx.get(f"http://127.0.0.1:{port}/stats;csv").text
    ingress = next(line for line in table.splitlines() if "-splitserve,SERVE_REPLICA_splitserve-ingress" in line)
    assert int(ingress.split(",")[7]) > 0  # sessions in all
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.2:{port}/stats")  # also this machine; who listens everywhere answers
    assert "    timeout http-request 30s" in lines
    assert "this Ray was started for another" not in server.log()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_answers_are_the_goldens(server: RunningServer, streamed: bool) -> None:
    goldens = GOLDENS[:6]
    answers = post_all(server, [golden_request(golden) for golden in goldens], num_at_once=6, streamed=streamed)
    for golden, (got,) in zip(goldens, answers, strict=True):
        if golden.check(got.token_ids) is None:  # else it differs at a near tie
            assert got.text == golden.text


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", ["queued", "prefilling"])
def test_a_client_that_goes_ends_its_request(server: RunningServer, phase: str, streamed: bool) -> None:
    """Its body comes in a packet of its own, as from most clients: HAProxy must notice then, too."""
    server.wait_for_baseline()
    for gate in PHASES[phase].gates:
        server.hold(gate)
    try:
        gone = Client(server, streamed)
        wait_for(lambda: PHASES[phase].reached(server))
        gone.cut()
        server.wait_for_baseline()
    finally:
        server.clear_faults()


def test_a_client_can_not_steer_serve(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
    plain = client.post(PATH, json=body).json()["choices"]
    headers = {
        "x-request-timeout-seconds": "0.000001",
        "serve-multiplexed-model-id": "a",
        "x-session-id": "b",
        "x-request-disconnect-disabled": "?1",
    }
    for name, value in headers.items():
        answer = client.post(PATH, json=body, headers={name: value})
        assert (answer.status_code, answer.json()["choices"]) == (200, plain), name


def test_request_ids_are_once_on_each_answer(client: httpx.Client) -> None:
    given = client.get("/health", headers={"x-request-id": "mine"})
    assert given.headers.get_list("x-request-id") == ["mine"]
    assert len(client.get("/health").headers.get_list("x-request-id")) == 1
    refused = client.get("/health", headers=[("x-request-id", b"\xff")])  # type: ignore[list-item]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize(("num_bytes", "status"), [(14_000, 200), (17_000, 400), (1_000_000, 400)])
def test_long_headers_are_refused(client: httpx.Client, num_bytes: int, status: int) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as link:
        link.settimeout(20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * num_bytes + b"\r\n\r\n")
        assert int(link.recv(12).split()[1]) == status


def test_nobody_notices_that_serves_controller_is_killed(server: RunningServer) -> None:
    before, old = replicas(server, "ingress") + replicas(server, "decode"), the_one(server, CONTROLLER)
    with steady_streams(server, GOLDENS[:4], num_clients=2, max_tokens=32) as streams:
        wait_until(lambda: len(streams.ended) >= 2, 120.0)
        killed_s = time.monotonic()
        kill(old)
        wait_until(lambda: len(set(processes(server, CONTROLLER)) - {old}) == 1, 120.0)
        back_s = time.monotonic()
        wait_until(lambda: len(streams.after(back_s + 3.0)) >= 2, 120.0)
    assert streams.during(killed_s)
    assert (streams.failed, streams.wrong) == ([], [])
    assert replicas(server, "ingress") + replicas(server, "decode") == before


@pytest.mark.exhaustive
def test_an_ingress_killed_before_its_answer_is_503_and_replaced(server: RunningServer) -> None:
    (old,) = replicas(server, "ingress")
    server.hold("decode.admit")
    try:
        with ThreadPoolExecutor(1) as pool, server.client() as client:
            asked = pool.submit(client.post, PATH, json={"prompt": "hi", "max_tokens": 2})
            wait_until(lambda: server.total("splitserve_requests_queued", pool="decode") == 1, 120.0)
            kill(old)
            answer = asked.result(120)
    finally:
        server.clear_faults()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "ingress_lost"
    wait_until(lambda: len(set(replicas(server, "ingress")) - {old}) == 1 and is_ready(server), 120.0)
    with steady_streams(server, GOLDENS[:2], num_clients=1, max_tokens=8) as streams:
        wait_until(lambda: len(streams.ended) >= 2, 120.0)
    assert (streams.failed, streams.wrong) == ([], [])


def test_haproxy_killed_cuts_what_is_open_and_is_started_again(server: RunningServer) -> None:
    before = replicas(server, "ingress")
    with steady_streams(server, GOLDENS[:4], num_clients=2, max_tokens=32) as streams:
        wait_until(lambda: len(streams.ended) >= 2, 120.0)
        with held_open(streams, 2):
            old, killed_s = programs(server, "haproxy"), time.monotonic()
            for pid in old:  # those before a reload serve their connections to the end, which may be now
                with contextlib.suppress(ProcessLookupError):
                    kill(pid)
        wait_until(lambda: bool(set(programs(server, "haproxy")) - set(old)) and is_ready(server), 120.0)
        back_s = time.monotonic()
        print(f"HAProxy is back after {back_s - killed_s:.1f} s")
        wait_until(lambda: len(streams.after(back_s)) >= 2, 120.0)
    assert [ended.error is not None for ended in streams.during(killed_s)] == [True] * 2
    assert [ended for ended in streams.failed if ended.began_s > back_s] == []
    assert streams.wrong == []
    assert replicas(server, "ingress") == before
    server.wait_for_baseline()


def test_the_end_lets_streams_end(server: RunningServer, one_server: OneServer) -> None:
    """The last of this file: it ends the server."""
    body = {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    begun, bad = threading.Event(), ("requests are cut", "failed to shut down")

    def streamed(url: str) -> int:
        with httpx.stream("POST", f"{url}{PATH}", json={**body, "stream": True}, timeout=120) as response:
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                begun.set()
        assert lines[-2] == "data: [DONE]"
        return sum('"token_ids":[' in line for line in lines)

    before = [server.log().count(words) for words in bad]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, server.url)
        assert begun.wait(120)
        began_s = time.monotonic()
        one_server.stop()
        assert answer.result(60) > 1
        assert time.monotonic() - began_s < 60.0
    assert [server.log().count(words) for words in bad] == before
