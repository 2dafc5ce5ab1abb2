"""A client that goes away, in every phase: all that was held for it is free again within 2 s, everywhere.

The lease is 60 s, so nothing here is freed by expiry. Phases are held open by gates (`testing.fault_dir`).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.golden.golden_set import load_goldens
from tests.server.generate import cut_connections, golden_request, post
from tests.server.running_server import RunningServer

GOLDENS = {golden.name: golden for golden in load_goldens()}


@pytest.fixture
def server(small_server: RunningServer) -> RunningServer:
    small_server.clear_faults()
    return small_server


@dataclass(frozen=True, slots=True)
class Phase:
    """gates: held from the start. reached: whether the server is in the phase now."""

    gates: tuple[str, ...]
    reached: Callable[[RunningServer], bool]


def _in_flight(server: RunningServer, pool: str) -> float:
    return server.total("splitserve_requests_in_flight", pool=pool)


def _blocks(server: RunningServer, pool: str, state: str) -> float:
    return server.total("splitserve_kv_blocks", pool=pool, state=state)


PHASES = {
    "queued": Phase(("decode.admit",), lambda server: server.total("splitserve_requests_queued", pool="decode") == 1),
    "admitted": Phase(
        ("prefill.admit",),
        lambda server: (
            _blocks(server, "decode", "reserved") > 0
            and server.total("splitserve_requests_queued", pool="prefill") == 1
        ),
    ),
    "prefilling": Phase(("prefill.step",), lambda server: _blocks(server, "prefill", "active") > 0),
    "handoff not sent": Phase(
        ("send_handoff",), lambda server: server.was_held("send_handoff") and _blocks(server, "prefill", "leased") > 0
    ),
    "reading KV": Phase(
        ("start_read",), lambda server: server.was_held("start_read") and _blocks(server, "decode", "active") > 0
    ),
    "before decode's first step": Phase(
        ("decode.step",),
        lambda server: (
            _in_flight(server, "decode") == 1
            and _blocks(server, "decode", "active") > 0
            and server.total("splitserve_kv_transfers_open") == 0
        ),
    ),
}


class Client:
    """One request on a connection of its own, which can be cut."""

    def __init__(self, server: RunningServer, streamed: bool, num_tokens: int = 150) -> None:
        self.num_chunks = 0
        self._client = server.client()
        body = {
            "prompt": [11] * 100,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
        }
        self._thread = threading.Thread(target=self._run, args=(body,))
        self._thread.start()

    def _run(self, body: dict[str, object]) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_raw():
                    self.num_chunks += 1
        except (httpx.HTTPError, OSError, RuntimeError):
            pass  # the connection was cut: that is the point

    def cut(self) -> None:
        """Close the connection under the request."""
        cut_connections(self._client)
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._client.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the phase was not reached"
        time.sleep(0.02)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", PHASES)
def test_everything_is_free_again(server: RunningServer, name: str, streamed: bool) -> None:
    server.wait_for_baseline()
    phase = PHASES[name]
    for gate in phase.gates:
        server.hold(gate)
    client = Client(server, streamed)
    wait_for(lambda: phase.reached(server))
    assert server.held()
    client.cut()
    # A phase that is one step or one read ends when that does: the gate opens, as the step would end.
    if name in ("reading KV", "handoff not sent"):
        server.clear_faults()
    server.wait_for_baseline()
    server.clear_faults()
    _still_serves(server)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_everything_is_free_again_mid_decode(server: RunningServer, streamed: bool) -> None:
    """Where this process stands still the answer may be over before its client goes: then another one."""
    tries = (_forwarded_for_one_that_goes(server, streamed) for _ in range(3))
    assert any(num_tokens < 300 for num_tokens in tries)
    _still_serves(server)


def _forwarded_for_one_that_goes(server: RunningServer, streamed: bool) -> float:
    """Of 400 tokens and a prompt."""
    server.wait_for_baseline()
    before = server.total("splitserve_forwarded_tokens_total")
    client = Client(server, streamed, num_tokens=400)
    wait_for(
        lambda: (
            server.total("splitserve_forwarded_tokens_total") > before + 5 and bool(client.num_chunks or not streamed)
        )
    )
    client.cut()
    server.wait_for_baseline()
    return server.total("splitserve_forwarded_tokens_total") - before


def _still_serves(server: RunningServer) -> None:
    golden = next(g for g in GOLDENS.values() if g.kind == "text" and len(g.prompt_ids) == 17)
    with server.client() as client:
        (answer,) = post(client, *golden_request(golden, 8))
    assert answer.token_ids == golden.output_ids[:8]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_requests", [96, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_many_mixed_requests_leave_nothing_behind(server: RunningServer, num_requests: int) -> None:
    rng = random.Random(17)
    goldens = [golden for golden in GOLDENS.values() if len(golden.prompt_ids) <= 64]

    def one(index: int) -> str:
        kind = ("exact", "exact", "sampled", "choices", "bad", "gone", "first only", "stop")[index % 8]
        golden = goldens[index % len(goldens)]
        path, body = golden_request(golden, 2 + index % 7)
        with server.client() as client:
            if kind == "exact":
                (answer,) = post(client, path, body)
                assert answer.token_ids == golden.output_ids[: body["max_tokens"]], golden.name
            elif kind == "sampled":
                post(client, path, {**body, "temperature": 1.0, "seed": index})
            elif kind == "choices":
                assert len(post(client, path, {**body, "temperature": 1.0, "n": 3})) == 3
            elif kind == "bad":
                assert client.post(path, json={**body, "max_tokens": -1}).status_code == 400
            elif kind == "first only":
                (answer,) = post(client, path, {**body, "max_tokens": 1})
                assert answer.token_ids == golden.output_ids[:1]
            elif kind == "stop":
                (answer,) = post(client, path, {**body, "stop_token_ids": [golden.output_ids[1]]})
                assert answer.finish_reason in ("stop", "length")
            else:
                with contextlib.suppress(httpx.TimeoutException):
                    client.post(path, json={**body, "max_tokens": 200, "stream": bool(index % 2)}, timeout=rng.random())
        return kind

    with ThreadPoolExecutor(16) as pool:
        kinds = list(pool.map(one, range(num_requests)))
    assert len(kinds) == num_requests
    server.wait_for_baseline()
    assert server.total("splitserve_requests_total", outcome="server_error") == 0
    assert server.total("splitserve_metric_errors_total") == 0
