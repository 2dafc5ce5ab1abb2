"""How many replicas each pool is to have, as the metrics tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.autoscaling import scaling_targets
from cluster.autoscaling.scaling_targets import ScalingTargets
from cluster.config.file import config_of
from cluster.monitoring.ingress_metrics import IngressMetrics

pytestmark = pytest.mark.usefixtures("skipped_waits")

FIXED = {"kv_capacity_tokens": 4096, "replicas": 2}
SCALING = {"kv_capacity_tokens": 4096, "autoscaling": {"min_replicas": 1, "max_replicas": 8, "initial_replicas": 4}}


def shown(metrics: IngressMetrics) -> dict[str, float]:
    """Gauges by pool, and the ratio."""
    values = {}
    for family in metrics.snapshot():
        if family["name"] == "splitserve_autoscaler_desired_replicas":
            values |= {labels["pool"]: value for _, labels, value in family["samples"]}
        if family["name"] == "splitserve_autoscaler_prefill_decode_ratio":
            values["ratio"] = family["samples"][0][2]
    return values


async def test_fixed_numbers_are_those_of_the_config_and_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: str) -> dict[str, int]:
        raise AssertionError("asked")

    monkeypatch.setattr(scaling_targets, "_targets", never)
    metrics = IngressMetrics("model", "1", "2")
    config = config_of({"pools": {"prefill": FIXED | {"replicas": 1}, "decode": FIXED}})
    ScalingTargets("app", metrics, interval_s=0.001).follow(config)
    await asyncio.sleep(0.02)
    assert shown(metrics) == {"prefill": 1, "decode": 2, "ratio": 0.5}


async def test_the_controller_is_asked_again_and_again_and_may_be_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [{"prefill": 3, "decode": 4, "ingress": 1}, OSError("away"), {"prefill": 0, "decode": 0}]

    async def ask(app_name: str) -> dict[str, int]:
        assert app_name == "app"
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(scaling_targets, "_targets", ask)
    metrics = IngressMetrics("model", "1", "2")
    targets = ScalingTargets("app", metrics, interval_s=0.01)
    targets.follow(config_of({"pools": {"prefill": FIXED, "decode": SCALING}}))
    assert shown(metrics) == {"prefill": 2, "decode": 4, "ratio": 0.5}
    await asyncio.sleep(0.005)
    assert shown(metrics) == {"prefill": 3, "decode": 4, "ratio": 0.75}
    await asyncio.sleep(0.1)
    assert "scaling targets unknown" in caplog.text
    assert shown(metrics) == {"prefill": 0, "decode": 0, "ratio": 0.75}, "a ratio of nothing stays what it was"


async def test_another_config_is_followed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(_: str) -> dict[str, int]:
        return {"prefill": 7, "decode": 7}

    monkeypatch.setattr(scaling_targets, "_targets", ask)
    metrics = IngressMetrics("model", "1", "2")
    targets = ScalingTargets("app", metrics, interval_s=0.001)
    targets.follow(config_of({"pools": {"prefill": FIXED, "decode": SCALING}}))
    await asyncio.sleep(0.01)
    assert shown(metrics) == {"prefill": 7, "decode": 7, "ratio": 1}
    targets.follow(config_of({"pools": {"prefill": FIXED, "decode": FIXED | {"replicas": 5}}}))
    await asyncio.sleep(0.01)
    assert shown(metrics) == {"prefill": 2, "decode": 5, "ratio": 0.4}, "nothing scales, so nobody is asked"


async def test_a_deployment_that_goes_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the server stops, they go one after the other."""
    asked = asyncio.Event()

    async def ask(_: str) -> dict[str, int]:
        asked.set()
        return {"decode": 3}

    monkeypatch.setattr(scaling_targets, "_targets", ask)
    targets = ScalingTargets("app", IngressMetrics("model", "1", "2"), interval_s=60.0)
    with caplog.at_level("INFO"):
        targets.follow(config_of({"pools": {"prefill": FIXED, "decode": SCALING}}))
        await asked.wait()
        await asyncio.sleep(0)
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", "a deployment has gone")]


@pytest.mark.parametrize("somebody_waits", [False, True])
async def test_the_router_is_told_sooner_while_somebody_waits(
    monkeypatch: pytest.MonkeyPatch, somebody_waits: bool
) -> None:
    num_asked, told = 0, list[Mapping[str, int]]()

    async def ask(_: str) -> dict[str, int]:
        nonlocal num_asked
        num_asked += 1
        return {"prefill": 2, "decode": num_asked, "ingress": 1}

    monkeypatch.setattr(scaling_targets, "_targets", ask)
    metrics = IngressMetrics("model", "1", "2")
    targets = ScalingTargets("app", metrics, told.append, lambda: somebody_waits, interval_s=1.0)
    targets.follow(config_of({"pools": {"prefill": FIXED, "decode": SCALING}}))
    assert told == [{"prefill": 2, "decode": 4}]
    for _ in range(50):
        await asyncio.sleep(0.01)
    assert told[1:] == [{"prefill": 2, "decode": 1 + index, "ingress": 1} for index in range(num_asked)]
    assert (num_asked > 1) is somebody_waits
