"""What is said when the server is ready: what is known then, and nothing that is not."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.root import Config
from cluster.serving.ready_lines import ready_lines

SIZE = {"kv_capacity_tokens": 4096}
SCALING = {"min_replicas": 0, "max_replicas": 3}
REPLICA = {"num_blocks": 256, "block_size": 16, "kv_bytes_per_token": 46_080}


def lines(pool: dict[str, Any], description: dict[str, list[dict[str, Any]]], port: int = 8000) -> list[str]:
    config = {"server": {"port": port}, "pools": {"prefill": pool, "decode": pool}}
    return [line.strip() for line in ready_lines(Config.model_validate(config), description).splitlines()]


def test_pools_that_are_there() -> None:
    found = lines(SIZE, {"decode": [REPLICA, REPLICA], "prefill": [REPLICA]})
    assert "replicas   1 ingress, 1 prefill, 2 decode" in found
    assert "KV cache   46,080 bytes a token" in found
    assert "capacity   8,192 tokens in the decode pool: 4 requests of full length" in found


@pytest.mark.parametrize(
    ("size", "known"),
    [
        (SIZE, "4,096 tokens (2 requests of full length)"),
        ({"kv_memory_bytes": 400_000_000}, "400,000,000 bytes"),
        ({"kv_memory_fraction": 0.9, "device": "cuda", "num_gpus": 1}, "90% of the GPU memory that is free then"),
    ],
)
def test_pools_that_are_empty_for_now(size: dict[str, Any], known: str) -> None:
    """Not "KV cache 0 bytes a token", nor a capacity of nothing."""
    found = lines(size | {"autoscaling": SCALING}, {"decode": [], "prefill": []})
    assert "replicas   1 ingress, 0 prefill (of up to 3), 0 decode (of up to 3)" in found
    assert "KV cache   bytes a token are known once a replica has started, with the first request" in found
    assert f"capacity   none now; {known} in each decode replica that starts" in found
    assert not any(" 0 bytes" in line or " 0 tokens" in line for line in found)


def test_one_pool_that_is_empty() -> None:
    """Both have the same layout."""
    found = lines(SIZE | {"autoscaling": SCALING}, {"decode": [], "prefill": [REPLICA]})
    assert "KV cache   46,080 bytes a token" in found
    assert any(line.startswith("capacity   none now") for line in found)


def test_what_can_be_done_now() -> None:
    found = lines(SIZE, {"decode": [REPLICA], "prefill": [REPLICA]})
    assert "Ctrl-C stops it when open requests are over; Ctrl-C again stops it at once" in found
    assert any(line.startswith("splitserve chat ") and "http" not in line for line in found), "the default address"
    found = lines(SIZE, {"decode": [REPLICA], "prefill": [REPLICA]}, port=9000)
    assert any(line.startswith("splitserve chat http://127.0.0.1:9000 ") for line in found)
