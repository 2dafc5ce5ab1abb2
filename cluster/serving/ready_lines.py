"""What a user needs to know when the server is ready, and as much of it as is known then."""

from __future__ import annotations

from typing import Any

from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.http.server_address import base_url

Description = dict[str, list[dict[str, Any]]]


def ready_lines(config: Config, description: Description) -> str:
    """description: metadata of each replica, by pool. A pool that autoscaling keeps empty has none yet."""
    url = base_url(config.server.host, config.server.port)
    chat_url = "" if url == "http://127.0.0.1:8000" else f" {url}"
    return "\n".join(
        [
            "",
            f"  URL        {url}/v1",
            f"  model      {config.model.name} ({config.model.dtype})",
            f"  replicas   {_replicas(config, description)}",
            f"  KV cache   {_kv_cache(config, description)}",
            f"  capacity   {_capacity(config, description)}",
            "",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f'    -d \'{{"model": "{config.model.name}", "max_tokens": 64, "temperature": 0,',
            '         "messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
            "",
            f"  splitserve chat{chat_url}      talks to it;  splitserve bench{chat_url}  measures it",
            "  Ctrl-C stops it when open requests are over; Ctrl-C again stops it at once",
            "",
        ]
    )


def _replicas(config: Config, description: Description) -> str:
    parts = [f"{config.ingress.first_replicas} ingress"]
    for name, pool in sorted(config.pools.deployed().items(), reverse=True):
        may_be = "" if pool.autoscaling is None else f" (of up to {pool.autoscaling.max_replicas})"
        parts.append(f"{len(description.get(name, ()))} {name}{may_be}")
    return ", ".join(parts)


def _kv_cache(config: Config, description: Description) -> str:
    """The same in both pools."""
    kv_type = " (fp8)" if config.kv_dtype == "fp8" else ""
    for table in description.values():
        for replica in table:
            return f"{replica['kv_bytes_per_token']:,} bytes a token{kv_type}"
    return "bytes a token are known once a replica has started, with the first request"


def _capacity(config: Config, description: Description) -> str:
    decode = description.get("decode", ())
    if decode:
        num_tokens = sum(replica["num_blocks"] * replica["block_size"] for replica in decode)
        return f"{num_tokens:,} tokens in the decode pool: {_fitting(config, num_tokens)}"
    return f"none now; {_capacity_of_one(config, config.pools.decode)} in each decode replica that starts"


def _capacity_of_one(config: Config, pool: PoolConfig) -> str:
    """As far as the config says it."""
    if pool.kv_capacity_tokens is not None:
        return f"{pool.kv_capacity_tokens:,} tokens ({_fitting(config, pool.kv_capacity_tokens)})"
    if pool.kv_memory_bytes is not None:
        return f"{pool.kv_memory_bytes:,} bytes"
    return f"{pool.kv_memory_fraction:.0%} of the GPU memory that is free then"


def _fitting(config: Config, num_tokens: int) -> str:
    num_requests = num_tokens // config.model.max_model_len
    return f"{num_requests} {'request' if num_requests == 1 else 'requests'} of full length"
