"""Serve's controller killed again and again for ten minutes, under streams: none notices, and nobody's memory grows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.golden.golden_set import load_goldens
from tests.server import processes
from tests.server.processes import CONTROLLER, PROXY, kill, programs, replicas, rss_bytes, the_one, wait_until
from tests.server.running_server import RunningServer, run_server
from tests.server.steady_streams import steady_streams

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1500)]

NUM_KILLS = 20
EVERY_S = 30.0
NUM_CLIENTS = 2
NUM_TOKENS = 40
_SAMPLE_S = 5.0
_BACK_WITHIN_S = 120.0  # a second where cores are free; half a minute was seen where ten others wanted each
_WARM_UP_S = 120.0  # allocators have what they need by then
_NOISE_BYTES = 24 << 20  # of one process
_NOISE_SHARE = 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server("local.yaml", tmp_path_factory.mktemp("soak")) as server:
        yield server


@dataclass(slots=True)
class Growth:
    """What one process held, sample by sample, and how many files it had open."""

    rss: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)

    def add(self, pid: int) -> None:
        self.rss.append(rss_bytes(pid))
        self.num_files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))


def watched(server: RunningServer) -> dict[str, int]:
    """Processes that stay, by name."""
    found = {name: replicas(server, name) for name in ("ingress", "prefill", "decode")}
    found |= {name: programs(server, name) for name in ("raylet", "gcs_server")}
    found |= {"proxy": processes.processes(server, PROXY), "agent": processes.processes(server, "ray::DashboardAgent")}
    assert all(len(pids) == 1 for pids in found.values()), found
    return {name: pids[0] for name, pids in found.items()} | {"serve command": server.process.pid}


def test_the_controller_killed_20_times_under_streams(server: RunningServer) -> None:
    pids = watched(server)
    growth = {name: Growth() for name in pids}
    controllers = [the_one(server, CONTROLLER)]
    killed_s: list[float] = []
    back_after_s: list[float] = []
    goldens = [golden for golden in load_goldens() if len(golden.prompt_ids) <= 60][:12]
    with steady_streams(server, goldens, NUM_CLIENTS, NUM_TOKENS) as streams:
        began_s = next_sample_s = time.monotonic()
        next_kill_s = began_s + EVERY_S
        while len(killed_s) < NUM_KILLS or time.monotonic() < next_kill_s:
            if len(killed_s) < NUM_KILLS and time.monotonic() >= next_kill_s:
                killed_s.append(time.monotonic())
                kill(controllers[-1])
                wait_until(lambda: new_controller(server, controllers) is not None, _BACK_WITHIN_S)
                back_after_s.append(time.monotonic() - killed_s[-1])
                next_kill_s = max(next_kill_s, time.monotonic() - EVERY_S / 2) + EVERY_S
            if time.monotonic() >= next_sample_s:
                next_sample_s += _SAMPLE_S
                for name, pid in pids.items():
                    growth[name].add(pid)
            assert not streams.failed, streams.failed
            time.sleep(0.2)
        took_s = time.monotonic() - began_s
    report = [
        f"{len(killed_s)} kills in {took_s:.0f} s, a new controller after {min(back_after_s):.1f} to "
        f"{max(back_after_s):.1f} s",
        f"{len(streams.ended)} streams of {NUM_TOKENS} tokens, {NUM_CLIENTS} at a time: {len(streams.failed)} failed, "
        f"{len(streams.wrong)} wrong, {streams.num_near_ties} near ties",
        *(line_of(name, of) for name, of in growth.items()),
    ]
    print("\n".join(report))
    assert not streams.failed, streams.failed
    assert not streams.wrong, streams.wrong
    assert all(streams.during(moment_s) for moment_s in killed_s), "some stream was open at each kill"
    assert len(set(controllers)) == NUM_KILLS + 1, "each kill was of another process"
    assert watched(server) == pids, "nobody else was replaced"
    for name, of in growth.items():
        before, after = begin_and_end(of.rss)
        assert after - before < max(_NOISE_BYTES, _NOISE_SHARE * before), line_of(name, of)


def test_the_last_controller_still_repairs(server: RunningServer) -> None:
    (pid,) = replicas(server, "decode")
    kill(pid)
    wait_until(lambda: len(set(replicas(server, "decode")) - {pid}) == 1, 120.0)
    wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200, 120.0)


def new_controller(server: RunningServer, before: list[int]) -> int | None:
    """The controller's process once it is another one, which is added to those before."""
    found = [pid for pid in processes.processes(server, CONTROLLER) if pid not in before]
    before.extend(found)
    return found[0] if found else None


def begin_and_end(values: list[int]) -> tuple[float, float]:
    """Medians of the minute after the warm-up, and of the last one."""
    num = round(60.0 / _SAMPLE_S)
    first = round(_WARM_UP_S / _SAMPLE_S)
    return statistics.median(values[first : first + num]), statistics.median(values[-num:])


def line_of(name: str, of: Growth) -> str:
    before, after = begin_and_end(of.rss)
    each_minute = " ".join(f"{rss >> 20}" for rss in of.rss[:: round(60.0 / _SAMPLE_S)])
    first, last = begin_and_end(of.num_files)
    return f"{name}: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB ({each_minute}), files {first:.0f} -> {last:.0f}"
