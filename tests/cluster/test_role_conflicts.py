"""What the config refuses of pools whose replicas may do the other pool's work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.root import Config


def values(**decode: Any) -> dict[str, Any]:
    sizes = {"kv_capacity_tokens": 4096, "max_batch_tokens": 512, "max_running_sequences": 32}
    return {
        "model": {"source": "bundled", "max_model_len": 1024},
        "routing": {"policy": "roles_by_cost"},
        "pools": {"prefill": {**sizes, "may_also": True}, "decode": {**sizes, "may_also": True, **decode}},
    }


def test_pools_of_equal_engines_may() -> None:
    assert all(pool.may_also for pool in Config.model_validate(values()).pools.deployed().values())
    one = values(may_also=False)
    assert not Config.model_validate(one).pools.decode.may_also


@pytest.mark.parametrize(
    ("changes", "decode", "reason"),
    [
        (
            {"routing": {"policy": "memory_then_queue"}},
            {},
            "pools.prefill.may_also.*needs routing.policy roles_by_cost",
        ),
        ({}, {"kv_capacity_tokens": 1536}, "kv_capacity_tokens.*less than twice model.max_model_len 1024"),
        ({}, {"device": "cuda", "num_gpus": 1}, "may_also.*different devices"),
        ({}, {"max_running_sequences": 1}, "max_running_sequences.*leaves none for a stream here; expected at least 2"),
        ({}, {"max_batch_tokens": 32}, "max_batch_tokens.*leaves no room for prompts"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], decode: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){reason}"):
        Config.model_validate(values(**decode) | changes)


def test_one_pool_has_no_other() -> None:
    alone = values() | {"layout": "colocated"}
    del alone["pools"]["prefill"]
    with pytest.raises(ValidationError, match=r"(?s)pools.decode.may_also.*has one pool"):
        Config.model_validate(alone)
