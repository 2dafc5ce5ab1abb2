"""Prefill and decode replicas on one card killed under streams, again and again: no text changes, no memory stays.

On an H200: 60 s until it is ready, 35 s for each of the ten rounds. Prefill is killed in every round, decode in five.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.golden.golden_set import load_goldens
from tests.gpu.served_place import PLACES, Place, serving
from tests.server.processes import kill, own_processes, replicas, wait_until
from tests.server.running_server import RunningServer
from tests.server.steady_streams import SteadyStreams, steady_streams

pytestmark = pytest.mark.timeout(900)

GOLDENS = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 90][:6]
NUM_REPLICAS = 2  # of each pool: while one is replaced the other goes on
PATIENCE_S = 300.0
_MIB = 1 << 20
_SLACK_BYTES = 256 * _MIB  # a context of CUDA is not of the same size each time; a pool or a model is more


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


def device_bytes(server: RunningServer) -> int:
    """Of the card, that the server's processes hold. 0: there is no card."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except FileNotFoundError:
        return 0
    ours = set(own_processes(server))
    held = [line.split(",") for line in lines if line.strip()]
    return sum(int(mib) * _MIB for pid, mib in held if int(pid) in ours)


def is_whole(server: RunningServer, dead: set[int]) -> bool:
    """Whether every pool has all its replicas again, each of which tells of its memory: it is ready."""
    samples = [labels for name, labels, _ in server.metrics() if name == "splitserve_kv_blocks"]
    for pool in ("prefill", "decode"):
        told = {labels["replica"] for labels in samples if labels["pool"] == pool}
        pids = replicas(server, pool)
        if dead.intersection(pids) or not len(pids) == len(told) == NUM_REPLICAS:
            return False
    return True


def kill_one(server: RunningServer, pool: str, number: int, streams: SteadyStreams) -> int:
    """While streams run. Its process id."""
    seen = len(streams.ended)
    wait_until(lambda: len(streams.ended) > seen, PATIENCE_S)
    pid = replicas(server, pool)[number % NUM_REPLICAS]
    kill(pid)
    return pid


def wait_for_more(streams: SteadyStreams, count: int) -> None:
    """Until so many streams are over that begin only now."""
    began_s = time.monotonic()
    wait_until(lambda: len(streams.after(began_s)) >= count, PATIENCE_S)


def test_killed_again_and_again(place: Place, tmp_path: Path) -> None:
    killed_s: dict[str, list[float]] = {"prefill": [], "decode": []}
    with serving("split", place, tmp_path, NUM_REPLICAS) as server:
        wait_until(lambda: is_whole(server, set()), PATIENCE_S)
        with steady_streams(server, GOLDENS, place.num_streams, place.num_tokens) as streams:
            wait_for_more(streams, 2 * place.num_streams)
            held = [device_bytes(server)]
            dead: set[int] = set()
            for number in range(max(place.num_kills.values())):
                for pool, times_s in killed_s.items():
                    if number < place.num_kills[pool]:
                        dead.add(kill_one(server, pool, number, streams))
                        times_s.append(time.monotonic())
                wait_until(lambda: is_whole(server, dead), PATIENCE_S)
                wait_for_more(streams, 2 * place.num_streams)
                held.append(device_bytes(server))
                print(f"round {number}: {held[-1] / _MIB:.0f} MiB of the card, {len(streams.ended)} streams so far")
        assert {pool: len(times_s) for pool, times_s in killed_s.items()} == place.num_kills
        assert all(streams.during(moment_s) for times_s in killed_s.values() for moment_s in times_s), "nothing ran"
        assert streams.failed == []
        assert streams.wrong == []
        server.wait_for_baseline(30.0)
    if place.device == "cuda":
        assert held[0] > 0, "the driver does not say what each process holds"
        assert max(held) - held[0] <= _SLACK_BYTES, [f"{num_bytes / _MIB:.0f} MiB" for num_bytes in held]
