"""Where decode replicas send tokens to."""

from __future__ import annotations

import pytest

from cluster.config.root import Config
from cluster.serving.ingress import channel_host


@pytest.mark.parametrize(("configured", "expected"), [("10.1.2.3", "10.1.2.3"), ("auto", "192.0.2.7")])
def test_auto_is_the_nodes_own_address(configured: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    pools = {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}
    config = Config.model_validate({"pools": pools, "ingress": {"channel_host": configured}})
    assert channel_host(config) == expected


def test_the_default_is_this_machine_only() -> None:
    assert (
        channel_host(
            Config.model_validate(
                {"pools": {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}}}
            )
        )
        == "127.0.0.1"
    )
