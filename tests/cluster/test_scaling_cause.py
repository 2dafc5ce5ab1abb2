"""Scale events: one sentence each that names what it is for."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cluster.autoscaling.pool_scaler import PoolState, ScalerMemory
from cluster.autoscaling.scaling_cause import scaling_cause
from cluster.autoscaling.scaling_log import log_scaling
from cluster.autoscaling.scaling_rules import ScalingRules, scaling_rules
from cluster.config.file import config_of
from cluster.routing.demand_report import DemandReport, HeardFigures
from cluster.terminal.replica_line import parse_line

SCALING = {"kv_capacity_tokens": 4096, "autoscaling": {"min_replicas": 0, "max_replicas": 6}}
RULES = scaling_rules(config_of({"pools": {"prefill": SCALING, "decode": SCALING}}))
COLOCATED = scaling_rules(config_of({"layout": "colocated", "pools": {"decode": SCALING}}))
POOLS = {name: PoolState(1, 1, (0, 6)) for name in ("prefill", "decode", "ingress")}
MEMORY = ScalerMemory(0.0, prefill_tokens_per_s=1000.0, shortest_step_s=0.01, replica_blocks=256.0)
HEARD = HeardFigures(replica_blocks=256.0)
NOTHING = DemandReport(0, 0, 0, 0, 0, 0, HEARD)
BUSY = replace(NOTHING, num_open=9)


def cause(
    name: str, number: int, demand: DemandReport, rules: ScalingRules = RULES, memory: ScalerMemory = MEMORY
) -> str:
    return scaling_cause(name, number, demand, rules, POOLS, memory)


@pytest.mark.parametrize(
    ("name", "number", "demand", "text"),
    [
        ("decode", 3, replace(BUSY, waiting_blocks=455.0), "455 KV blocks waiting"),
        ("decode", 3, replace(BUSY, heard=replace(HEARD, decode_blocks=700.0)), "700 KV blocks promised"),
        ("decode", 9, replace(BUSY, heard=replace(HEARD, decode_sequences=512.0)), "512 sequences"),
        ("decode", 4, replace(BUSY, heard=replace(HEARD, decode_step_s=0.2)), "a token takes 200 ms"),
        ("decode", 2, BUSY, "the pools' ratio"),
        ("prefill", 4, replace(BUSY, waiting_prompt_tokens=17_500.0), "17500 prompt tokens waiting"),
        ("prefill", 2, BUSY, "the pools' ratio"),
        ("ingress", 2, BUSY, "9 requests are open"),
        ("decode", 0, NOTHING, "no work for it"),
    ],
)
def test_it_is_named_what_most_replicas_are_needed_for(name: str, number: int, demand: DemandReport, text: str) -> None:
    assert cause(name, number, demand) == text


def test_prompts_that_keep_arriving() -> None:
    memory = replace(MEMORY, arriving_tokens_per_s=3000.0)
    assert cause("prefill", 4, BUSY, memory=memory) == "3000 prompt tokens a second arriving"
    assert cause("decode", 4, BUSY, COLOCATED, memory) == "3000 prompt tokens a second arriving"


def test_a_pool_that_shrinks_or_starts_anew() -> None:
    three = {**POOLS, "decode": PoolState(3, 3, (0, 6))}
    assert scaling_cause("decode", 1, NOTHING, RULES, three, MEMORY) == "no work"
    assert scaling_cause("decode", 1, BUSY, RULES, three, MEMORY) == "what there is to do fits into fewer"
    none = {**POOLS, "decode": PoolState(0, 0, (0, 6))}
    for num_held, text in ((1, "1 request waits"), (2, "2 requests wait")):
        found = scaling_cause("decode", 1, replace(BUSY, num_held=num_held), RULES, none, MEMORY)
        assert found == f"{text} for a first replica"
    assert scaling_cause("decode", 1, BUSY, RULES, none, MEMORY) == "there is work"


def test_the_sentence_is_no_warning_and_is_understood_by_the_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private.logging_utils import ServeFormatter

    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    log_scaling("decode", 1, 3, "455 KV blocks waiting")
    record = caplog.records[0]
    assert record.levelno == logging.INFO
    line = parse_line(ServeFormatter("controller", "12").format(record))
    assert line is not None, "Ray Serve's format has changed"
    assert line.as_text("controller 12").partition(" ")[2] == "INFO autoscaling: decode 1 -> 3 (455 KV blocks waiting)"
