"""/health/ready, by what there is: a table."""

from __future__ import annotations

import pytest

from cluster.lifecycle.readiness import PoolHealth, Readiness, readiness
from cluster.policies.routing_policy import RoutingRules

SPLIT = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=False)
FALLBACK = RoutingRules(has_prefill_pool=True, local_prefill_max_tokens=0, fallback_to_decode=True)
COLOCATED = RoutingRules(has_prefill_pool=False, local_prefill_max_tokens=0, fallback_to_decode=False)
A, B, NONE, COLD = PoolHealth(("a",)), PoolHealth(("b",)), PoolHealth(), PoolHealth(can_cold_start=True)
FROZEN = PoolHealth(num_lost=2)
STRANGE = PoolHealth(num_strangers=2)
MIXED = PoolHealth(("b", "a"), num_lost=1)

# rules, prefill, decode -> missing pools, words of the reason
TABLE = {
    "a pair": (SPLIT, A, A, (), None),
    "no prefill": (SPLIT, NONE, A, ("prefill",), "no prefill replica can be used"),
    "no decode": (SPLIT, A, NONE, ("decode",), "no decode replica"),
    "nothing": (SPLIT, NONE, NONE, ("prefill", "decode"), "no prefill"),
    "all prefill frozen": (SPLIT, FROZEN, A, ("prefill",), "2 do not answer"),
    "all decode frozen": (SPLIT, A, FROZEN, ("decode",), "2 do not answer"),
    "half frozen": (SPLIT, MIXED, A, (), None),
    "no pair that can exchange KV": (SPLIT, A, B, (), None),
    "all with another tokenizer": (SPLIT, A, STRANGE, ("decode",), "2 have another tokenizer"),
    "in the middle of an update": (SPLIT, A, MIXED, (), None),
    "prefill asleep": (SPLIT, COLD, A, (), None),
    "decode asleep": (SPLIT, A, COLD, (), None),
    "all asleep": (SPLIT, COLD, COLD, (), None),
    "decode does both": (FALLBACK, NONE, A, (), None),
    "decode does both, others differ": (FALLBACK, B, A, (), None),
    "decode would do both": (FALLBACK, A, NONE, ("decode",), "no decode replica"),
    "colocated": (COLOCATED, None, A, (), None),
    "colocated, none": (COLOCATED, None, NONE, ("decode",), "no decode replica"),
    "colocated, asleep": (COLOCATED, None, COLD, (), None),
}


@pytest.mark.parametrize("case", TABLE)
def test_ready_if_every_configured_path_is_usable(case: str) -> None:
    rules, prefill, decode, missing, words = TABLE[case]
    pools = {"prefill": prefill, "decode": decode} if prefill is not None else {"decode": decode}
    found = readiness(pools, rules)
    assert found.is_ready == (words is None)
    assert found.missing_pools == missing
    assert words is None or words in " ".join(found.reasons)


def test_what_is_wrong_while_it_serves_all_the_same_is_told() -> None:
    found = readiness({"prefill": A, "decode": B}, SPLIT, faulty=["decode-1 is unlike"])
    assert found.is_ready
    assert found.notes == (
        "no prefill replica can hand its KV cache to a decode replica: decode computes all prompts",
        "decode-1 is unlike",
    )
    assert readiness({"prefill": A, "decode": MIXED}, SPLIT).notes == ()
    assert len(readiness({"decode": A}, COLOCATED, faulty=["one"] * 99).notes) == 4


def test_not_while_the_server_is_being_stopped() -> None:
    assert readiness({"decode": A}, COLOCATED, is_draining=True) == Readiness(reasons=("this server is being stopped",))


def test_lost_replicas_are_counted() -> None:
    assert readiness({"prefill": MIXED, "decode": FROZEN}, SPLIT).num_lost == 3
