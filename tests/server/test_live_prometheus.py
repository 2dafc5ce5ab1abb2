"""A real Prometheus scrapes 2 prefill and 2 decode replicas under load. Draws the dashboards into docs/.

make test LANES= ARGS='-m exhaustive tests/server/test_live_prometheus.py -s'        about 4 minutes
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster.load.client import Target
from cluster.load.length_range import LengthRange
from cluster.load.load_plan import LoadPlan
from cluster.load.processes import LoadResult, run_load
from cluster.load.report import latencies_s
from cluster.monitoring.metric_table import metric_table
from tests.monitoring.dashboard_file import DASHBOARDS, ROOT, load, panels_of
from tests.monitoring.promtool import promtool
from tests.server.dashboard_picture import draw, legend_of
from tests.server.prometheus_server import SCRAPE_INTERVAL_S, Points, Prometheus, needs_prometheus, run_prometheus
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1500), needs_prometheus]

NUM_REQUESTS = 80
# What two cores carry with room to spare: the pictures are to show a system that is well.
RATE_PER_S = 0.5
# Four scrapes, as Grafana chooses it.
RATE_INTERVAL = f"{4 * SCRAPE_INTERVAL_S}s"
SUMS = {
    "requests": 'splitserve_requests_total{outcome="ok"}',
    "prompt tokens": "splitserve_prompt_tokens_total",
    "generated tokens": "splitserve_generation_tokens_total",
    "ttft": "splitserve_time_to_first_token_seconds_sum",
    "itl": "splitserve_inter_token_latency_seconds_sum",
    "e2el": "splitserve_e2e_request_latency_seconds_sum",
    "ttft count": "splitserve_time_to_first_token_seconds_count",
    "itl count": "splitserve_inter_token_latency_seconds_count",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A server, its Prometheus, and what became of a load. grown: by how much each of SUMS grew meanwhile."""

    server: RunningServer
    prometheus: Prometheus
    start_s: float
    end_s: float
    result: LoadResult
    grown: dict[str, float]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("live")
    with (
        run_server("local-2p2d.yaml", folder, {"slo.ttft_s": 4.0, "slo.tpot_s": 0.3, "slo.e2e_s": 15.0}) as server,
        run_prometheus(server.url.removeprefix("http://"), folder) as prometheus,
    ):
        prometheus.wait_for_scrape()
        before = _totals(prometheus)
        start_s = time.time()
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        plan = LoadPlan(
            Target(server.url, model),
            rate_per_s=RATE_PER_S,
            num_requests=NUM_REQUESTS,
            inputs=LengthRange(64, 256),
            outputs=LengthRange(16, 48),
            body={"temperature": 0.0, "ignore_eos": True},
        )
        result = run_load(plan)
        prometheus.wait_for_scrape()
        after = _totals(prometheus)
        grown = {name: after[name] - before[name] for name in SUMS}
        yield Loaded(server, prometheus, start_s, time.time(), result, grown)


def _totals(prometheus: Prometheus) -> dict[str, float]:
    return {name: prometheus.value(f"sum({metric})") for name, metric in SUMS.items()}


def test_counts_and_latency_sums_are_the_clients_own(loaded: Loaded) -> None:
    records, grown = loaded.result.records, loaded.grown
    assert all(record.is_ok for record in records)
    found = latencies_s(records)
    theirs = {
        "requests": len(records),
        "prompt tokens": sum(record.num_input_tokens for record in records),
        "generated tokens": sum(record.num_output_tokens for record in records),
        "ttft": math.fsum(found["ttft"]),
        "itl": math.fsum(found["itl"]),
        "e2el": math.fsum(found["e2el"]),
        "ttft count": len(records),
        "itl count": sum(record.num_output_tokens - 1 for record in records),
    }
    for name, value in theirs.items():
        print(f"{name:<17} client {value:10.2f}  Prometheus {grown[name]:10.2f}  {grown[name] / value - 1:+.2%}")
    for name in ("requests", "prompt tokens", "generated tokens", "ttft count", "itl count"):
        assert grown[name] == theirs[name], name
    for name in ("ttft", "itl", "e2el"):
        assert grown[name] == pytest.approx(theirs[name], rel=0.05), name


def test_prometheus_finds_no_fault_with_what_it_scrapes(loaded: Loaded) -> None:
    text = httpx.get(f"{loaded.server.url}/metrics").content
    assert promtool("check", "metrics", stdin=text) == ""
    (target,) = loaded.prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    span = f"[{math.ceil(loaded.end_s - loaded.start_s)}s]"
    assert loaded.prometheus.value(f"min_over_time(up{span})") == 1
    print(f"longest scrape {loaded.prometheus.value(f'max_over_time(scrape_duration_seconds{span})'):.3f} s")
    groups = loaded.prometheus.get("rules")["groups"]
    unwell = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]
    assert not unwell
    names = {sample[0] for sample in loaded.server.metrics()}
    known = {row.name for row in metric_table()}
    stems = {name for name in names for row in known if name.startswith(row)}
    assert names == stems


def test_the_phases_add_up_to_the_request(loaded: Loaded) -> None:
    """What the phases took at the replicas, against what the ingress measured."""
    names = ("queue_time", "prefill_time", "kv_transfer", "decode_time")
    parts = [loaded.prometheus.value(f"sum(splitserve_{name}_seconds_sum)") for name in names]
    whole = loaded.prometheus.value("sum(splitserve_e2e_request_latency_seconds_sum)")
    print(f"{sum(parts):.1f} s in phases of {whole:.1f} s")
    assert 0.75 * whole < sum(parts) < 1.02 * whole


@pytest.mark.parametrize("file", DASHBOARDS, ids=[file.stem for file in DASHBOARDS])
def test_every_panel_has_data_and_is_drawn(loaded: Loaded, file: Path) -> None:
    board = load(file)
    panels = list(panels_of(board, RATE_INTERVAL))
    data: dict[str, dict[str, Points]] = {}
    for panel in panels:
        for query in panel.queries:
            series = loaded.prometheus.series(query.promql, loaded.start_s, loaded.end_s, SCRAPE_INTERVAL_S)
            assert series, f"{panel.title}: no data for {query.promql}"
            data.setdefault(panel.title, {}).update(
                {legend_of(query.legend, labels): points for labels, points in series}
            )
    name = board["uid"].removeprefix("splitserve-")
    date = time.strftime("%Y-%m-%d", time.gmtime(loaded.end_s))
    title = f"{board['title']}: 2 prefill and 2 decode replicas of SmolLM2-135M on {os.cpu_count()} CPU cores, {date}"
    picture = ROOT / "docs" / f"dashboard-{name}.png"
    draw(title, panels, data, picture)
    assert picture.stat().st_size > 50_000
