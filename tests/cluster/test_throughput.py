"""The line of throughput: every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from cluster.config.slo import SloConfig
from cluster.monitoring.cache_finding import CacheFinding
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.request_timer import RequestTimer
from cluster.monitoring.throughput import ThroughputLog, WorkDone, WorkState
from replicas.structured_log import TextFormatter


class Rig:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "cluster.monitoring.throughput")
        self._caplog, self.now_s, self.state = caplog, 100.0, WorkState(0, None)
        self.metrics = IngressMetrics("m", "1", "2")
        self.log = ThroughputLog(self.metrics.work, lambda: self.state, clock=lambda: self.now_s)

    def tell(self, after_s: float = 10.0) -> list[str]:
        """What is said after so long."""
        self._caplog.clear()
        self.now_s += after_s
        self.log.tell()
        return [TextFormatter().format(record).partition(" ")[2] for record in self._caplog.records]

    def request(self, num_prompt_tokens: int) -> RequestTimer:
        timer = RequestTimer(self.metrics, "/v1/completions", SloConfig())
        timer.prompts([(num_prompt_tokens, CacheFinding())])
        return timer


@pytest.fixture
def rig(caplog: pytest.LogCaptureFixture) -> Rig:
    return Rig(caplog)


def test_nothing_is_said_while_nothing_is_done(rig: Rig) -> None:
    assert rig.tell() == []


def test_what_runs_what_waits_and_how_fast_it_goes(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    running, waiting = rig.request(300), rig.request(50)
    for _ in range(25):
        running.token(0)
    rig.state = WorkState(1, 0.344)
    line = "INFO 1 running, 1 waiting; prompts 30 tok/s, generated 2.5 tok/s; KV cache 34% promised"
    assert rig.tell() == [line]
    fields: dict[str, Any] = vars(caplog.records[0])
    assert (fields["event"], fields["running"], fields["waiting"]) == ("throughput", 1, 1)
    assert (fields["prompt_tokens_per_s"], fields["generated_tokens_per_s"], fields["kv_promised"]) == (
        30.0,
        2.5,
        0.344,
    )
    running.token(0)
    running.over("ok", ["length"])
    waiting.over("rejected", [])
    rig.state = WorkState(0, None)
    assert rig.tell(5.0) == ["INFO 0 running, 0 waiting; prompts 0 tok/s, generated 0.2 tok/s; KV cache: no replica"]
    assert rig.tell() == []


def test_choices_of_a_request_share_its_prompt(rig: Rig) -> None:
    timer = rig.request(100)
    for choice in (0, 1, 1):
        timer.token(choice)
    assert rig.metrics.work == WorkDone(1, 100, 3)


async def test_it_goes_on_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.monitoring.throughput")
    log = ThroughputLog(WorkDone(num_open=1), lambda: WorkState(0, 0.0), interval_s=0.01)
    log.start()
    while len(caplog.records) < 3:
        await asyncio.sleep(0.01)
