"""A decode replica on a card is told to go while streams run there: they go on at the other one, with their KV.

On an H200: 60 s until it is ready, some 30 s for each round.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.golden.golden_set import load_goldens
from tests.gpu.served_place import PLACES, Place, serving
from tests.server.generate import golden_request, stream
from tests.server.processes import replicas, wait_until
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.timeout(900)

GOLDENS = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 90][:8]
NUM_TOKENS = {"cuda": 400, "cpu": 80}
NUM_ROUNDS = 3
PATIENCE_S = 300.0
_FIRST_TOKENS = "splitserve_time_to_first_token_seconds_count"


@pytest.mark.parametrize("place", PLACES)
def test_streams_go_on_where_another_replica_has_room(place: Place, tmp_path: Path) -> None:
    num_tokens = NUM_TOKENS[place.device]
    goldens = GOLDENS if place.device == "cuda" else GOLDENS[:4]
    with serving("split", place, tmp_path, num_replicas=2) as server:
        for _ in range(NUM_ROUNDS if place.device == "cuda" else 1):
            wait_until(lambda: len(replicas(server, "decode")) == 2, PATIENCE_S)
            num_before = server.total(_FIRST_TOKENS)
            with server.client(PATIENCE_S) as client, ThreadPoolExecutor(len(goldens)) as pool:
                asked = [pool.submit(stream, client, *golden_request(golden, num_tokens)) for golden in goldens]
                wait_until(lambda seen=num_before: server.total(_FIRST_TOKENS) > seen, PATIENCE_S)  # type: ignore[misc]
                pid = replicas(server, "decode")[0]
                os.kill(pid, signal.SIGTERM)
                for golden, future in zip(goldens, asked, strict=True):
                    (answer,) = future.result(PATIENCE_S)
                    golden.check(answer.token_ids[: len(golden.output_ids)])
                    assert len(answer.token_ids) == num_tokens
            wait_until(lambda gone=pid: not Path(f"/proc/{gone}").exists(), PATIENCE_S)  # type: ignore[misc]
        assert moves(server, "moved") > 0
        assert not moves(server, "lost")
        wait_until(lambda: len(replicas(server, "decode")) == 2, PATIENCE_S)
        server.wait_for_baseline(30.0)


def moves(server: RunningServer, outcome: str) -> float:
    return server.total("splitserve_migrations_total", outcome=outcome)
