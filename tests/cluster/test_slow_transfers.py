"""Decode replicas that read KV slower than it would be computed are found, told of once, and shown until it is over."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from cluster.lifecycle.readiness import PoolHealth, readiness
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.policies.routing_policy import RoutingRules
from cluster.routing.slow_transfers import SlowestRead, SlowTransferWatch, slowest_reads
from replicas.messages import EngineLoad
from tests.cluster.fake_model import generation_of
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import running_router

pytestmark = pytest.mark.usefixtures("skipped_waits")

IDLE = EngineLoad(0, 0, 0, 10, 10, 0.0)
PREFILL = replace(IDLE, prefill_tokens_per_s=40_000.0)
BYTES_PER_TOKEN = 131_072  # of Llama-3.1-8B: 5.2 GB of KV a second are computed
SPLIT = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)


def decode(source: str, gb_per_s: float, **more: Any) -> EngineLoad:
    return replace(IDLE, slowest_source=source, slowest_read_bytes_per_s=gb_per_s * 1e9, **more)


def found_of(*loads: EngineLoad, prefills: tuple[EngineLoad, ...] = (PREFILL, IDLE)) -> list[SlowestRead]:
    names = [f"d{number}" for number in range(len(loads))]
    table = {name: {"kv_bytes_per_token": BYTES_PER_TOKEN} for name in names}
    return list(slowest_reads(table, dict(zip(names, loads, strict=True)), prefills))


def test_the_slowest_of_each_is_held_against_what_computing_makes() -> None:
    (read,) = found_of(decode("p1", 0.5))
    assert read == SlowestRead("d0", "p1", 0.5e9, 40_000 * BYTES_PER_TOKEN)
    assert str(read) == (
        "decode replica d0 reads KV from replica p1 at 0.5 GB/s: to compute a prompt again would be faster (5.24 GB/s)"
    )


def test_decode_s_own_rate_counts_if_it_has_computed_prompts() -> None:
    (read,) = found_of(decode("p1", 0.5, prefill_tokens_per_s=1_000.0))
    assert read.computed_bytes_per_s == 1_000 * BYTES_PER_TOKEN


def test_who_has_measured_nothing_or_is_unknown_is_left_out() -> None:
    assert found_of(IDLE) == []
    assert list(slowest_reads({"d0": {}}, {}, [PREFILL])) == []
    (read,) = slowest_reads({"d0": {}}, {"d0": decode("p", 1.0)}, [PREFILL])  # of an older version
    assert read.computed_bytes_per_s == 0.0


class Watched:
    def __init__(self) -> None:
        self.metrics = IngressMetrics("model", "1", "2")
        self.watch = SlowTransferWatch(self.metrics.slow_transfers.set)

    def look(self, *loads: EngineLoad, prefills: tuple[EngineLoad, ...] = (PREFILL,)) -> list[tuple[str, str]]:
        self.watch.look(found_of(*loads, prefills=prefills))
        return [read.key for read in self.watch.found]

    @property
    def gauge(self) -> float:
        (family,) = (f for f in self.metrics.snapshot() if f["name"] == "splitserve_slow_transfers")
        ((_, _, value),) = family["samples"]
        return value


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.event, record.reader) for record in caplog.records if hasattr(record, "reader")]  # type: ignore[attr-defined]


def test_it_is_said_when_it_is_found_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    assert watched.look(decode("p1", 0.5), decode("p1", 500.0)) == [("d0", "p1")]
    assert watched.gauge == 1
    assert watched.look(decode("p1", 0.6), decode("p1", 500.0)) == [("d0", "p1")]
    assert events(caplog) == [("slow_transfer", "d0")]
    assert watched.look(decode("p2", 20.0), decode("p1", 500.0)) == []
    assert watched.gauge == 0
    assert events(caplog) == [("slow_transfer", "d0"), ("slow_transfer_over", "d0")]


def test_one_on_the_brink_is_found_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    for gb_per_s in (5.3, 5.2, 5.3, 5.2, 5.3, 6.0, 5.2):
        watched.look(decode("p1", gb_per_s))
    assert len(events(caplog)) == 1
    watched.look(decode("p1", 7.0))
    assert [event for event, _ in events(caplog)] == ["slow_transfer", "slow_transfer_over"]


def test_before_anybody_has_computed_a_prompt_nothing_is_too_slow() -> None:
    assert Watched().look(decode("p1", 0.001), prefills=(IDLE,)) == []


def test_a_replica_that_has_gone_is_over(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.look(decode("p1", 0.5))
    assert watched.look() == []
    assert (watched.gauge, watched.watch.slowest) == (0, None)


def test_it_looks_once_a_second_however_many_frames_come() -> None:
    watch = Watched().watch
    assert [watch.is_due(10 + second / 10) for second in range(25)].count(True) == 3


async def test_a_router_hears_of_it_in_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.routing.slow_transfers._LOOK_EVERY_S", 0.0)
    cluster = FakeCluster(num_decode=1, num_prefill=1)
    assert cluster.prefill is not None
    ((decode_id, of_decode),) = cluster.decode.members.items()
    ((prefill_id, of_prefill),) = cluster.prefill.members.items()
    of_prefill.more_load = {"prefill_tokens_per_s": 1000.0}
    of_decode.more_load = {"slowest_source": prefill_id, "slowest_read_bytes_per_s": 400.0}
    async with running_router(cluster) as rig:
        await rig.tokens(generation_of())
        watch = rig.router.slow_transfers
        assert watch.found == (SlowestRead(decode_id, prefill_id, 400.0, 1000.0),)
        of_decode.more_load["slowest_read_bytes_per_s"] = 4000.0
        await rig.tokens(generation_of())
        assert watch.found == ()
        assert watch.slowest == SlowestRead(decode_id, prefill_id, 4000.0, 1000.0)


def test_readiness_names_the_slowest_and_those_too_slow() -> None:
    watched = Watched()
    watched.look(decode("p1", 0.5), decode("p1", 500.0))
    pools = {"prefill": PoolHealth(("a",)), "decode": PoolHealth(("a",))}
    found = readiness(pools, SPLIT, faulty=watched.watch.found, slowest_read=watched.watch.slowest)
    assert found.is_ready
    assert found.notes == (str(watched.watch.found[0]),)
    assert found.slowest_read is not None
    assert found.slowest_read.key == ("d0", "p1")
