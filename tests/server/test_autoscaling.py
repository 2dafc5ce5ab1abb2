"""Pools that grow, shrink and go to zero under a real load; no request is lost or cut in any of it.

Takes about ten minutes, and ten more for the steady load:
`make test ARGS='-m exhaustive tests/server/test_autoscaling.py'`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.golden.golden_set import Golden, load_goldens
from tests.server.generate import golden_request, post, stream
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]

GOLDENS = [golden for golden in load_goldens() if 20 <= len(golden.prompt_ids) <= 60]
DOWN_S, ZERO_S = 20.0, 30.0
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes: dict[str, Any] = {}
    for pool in ("prefill", "decode"):
        changes[f"pools.{pool}.autoscaling.downscale_delay_s"] = DOWN_S
        changes[f"pools.{pool}.autoscaling.downscale_to_zero_delay_s"] = ZERO_S
    with run_server("local-autoscaling.yaml", tmp_path_factory.mktemp("scaling"), changes) as server:
        yield server


class Watch:
    """Looks at the numbers of replicas all the time. seen: by pool, every number that it was to have, in order."""

    def __init__(self, server: RunningServer) -> None:
        self._server, self._began_s = server, time.monotonic()
        self.wanted: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.seen: dict[str, list[int]] = {"prefill": [], "decode": []}

    def look(self) -> None:
        samples = self._server.metrics()
        for name, labels, value in samples:
            if name == "splitserve_autoscaler_desired_replicas" and labels["pool"] in self.seen:
                pool = labels["pool"]
                self.wanted[pool] = int(value)
                if self.seen[pool][-1:] != [int(value)]:
                    self.seen[pool].append(int(value))
                    print(f"{time.monotonic() - self._began_s:6.1f} s: {pool} is to have {int(value)}", flush=True)
        built = [labels["pool"] for name, labels, _ in samples if name == "splitserve_build_info"]
        self.running = {pool: built.count(pool) for pool in self.seen}

    def until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        self.look()
        while not condition():
            assert time.monotonic() < deadline_s, (self.wanted, self.running, self.seen)
            time.sleep(1.0)
            self.look()


class Load:
    """Sends requests and checks every answer. num_right: whole and exact."""

    def __init__(self, server: RunningServer) -> None:
        self._server, self._stop, self._lock = server, threading.Event(), threading.Lock()
        self._numbers = itertools.count()
        self.num_right = 0

    def stop(self) -> None:
        self._stop.set()

    def ask(self, golden: Golden, num_tokens: int) -> None:
        """One request, streamed every second time; fails unless the answer is whole and as transformers gives it."""
        send = stream if next(self._numbers) % 2 else post
        with self._server.client() as client:
            (answer,) = send(client, *golden_request(golden, num_tokens))
        golden.check(answer.token_ids[:64])
        assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
        with self._lock:
            self.num_right += 1

    def ask_on(self, num_tokens: int) -> None:
        """One after the other until stopped."""
        while not self._stop.is_set():
            self.ask(GOLDENS[next(self._numbers) % len(GOLDENS)], num_tokens)

    def prefill_on(self, prompt_len: int) -> None:
        """Prompts of which only one token is wanted, each another, until stopped."""
        with self._server.client() as client:
            while not self._stop.is_set():
                number = next(self._numbers)
                prompt = [5 + (number * 31 + index * 17) % 1000 for index in range(prompt_len)]
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
                (answer,) = post(client, "/v1/completions", body)
                assert len(answer.token_ids) == 1
                with self._lock:
                    self.num_right += 1


@contextmanager
def running(load: Load, work: Callable[..., None], argument: int, num_at_once: int) -> Iterator[list[Future[None]]]:
    """So many at once; at the end all that was begun must have been answered right."""
    with ThreadPoolExecutor(num_at_once) as pool:
        futures = [pool.submit(work, argument) for _ in range(num_at_once)]
        try:
            yield futures
        finally:
            load.stop()
        for future in futures:
            future.result()


def test_pools_follow_their_work_from_zero_and_back(server: RunningServer) -> None:
    watch, load = Watch(server), Load(server)
    watch.look()
    assert watch.wanted == watch.running == {"prefill": 0, "decode": 0}

    began_s = time.monotonic()
    load.ask(GOLDENS[0], 64)
    print(f"cold start: {time.monotonic() - began_s:.1f} s")
    watch.until(lambda: watch.running == {"prefill": 1, "decode": 1})
    assert server.total("splitserve_cold_start_wait_seconds_count") == 1

    # 24 x 300 tokens take more than one decode replica of 4096; their prompts are little for prefill.
    with ThreadPoolExecutor(24) as pool:
        futures = []
        for golden in GOLDENS[:24]:
            futures.append(pool.submit(load.ask, golden, 300 - len(golden.prompt_ids)))
            time.sleep(0.7)
        watch.until(lambda: watch.running["decode"] >= 2)
        for future in futures:
            future.result()
    print(f"decode grew under {load.num_right} requests")

    # It shrinks while others go on.
    with running(load, load.ask_on, 64, 1):
        watch.until(lambda: watch.wanted["decode"] == 1 and watch.running["decode"] == 1)

    prompts = Load(server)
    num_decodes = len(watch.seen["decode"])
    with running(prompts, prompts.prefill_on, 450, 6):
        watch.until(lambda: watch.running["prefill"] == 2)
    assert len(watch.seen["decode"]) == num_decodes, "decode had nothing to do with it"
    few = Load(server)
    with running(few, few.ask_on, 64, 1):
        watch.until(lambda: watch.wanted["prefill"] == 1 and watch.running["prefill"] == 1)

    watch.until(lambda: watch.running == {"prefill": 0, "decode": 0})
    load.ask(GOLDENS[1], 64)
    # Prefill may have been at zero before, while decode was still busy with long outputs.
    assert server.total("splitserve_cold_start_wait_seconds_count") >= 2
    total = load.num_right + prompts.num_right + few.num_right
    assert server.total("splitserve_requests_total", outcome="ok") == total
    assert server.total("splitserve_requests_total") == total
    print(f"{total} requests, all right; prefill {watch.seen['prefill']}, decode {watch.seen['decode']}")


def test_a_steady_load_changes_nothing_for_ten_minutes(server: RunningServer) -> None:
    watch, load = Watch(server), Load(server)
    with running(load, load.ask_on, 64, 3):
        watch.until(lambda: watch.running["prefill"] >= 1 and watch.running["decode"] >= 1)
        settled_s = time.monotonic() + 2 * DOWN_S
        watch.until(lambda: time.monotonic() > settled_s)
        before = {pool: list(seen) for pool, seen in watch.seen.items()}
        end_s = time.monotonic() + 600.0
        watch.until(lambda: time.monotonic() > end_s, patience_s=700.0)
    assert watch.seen == before
    print(f"{load.num_right} requests, all right; unchanged: {watch.wanted}")
