"""How large the simulated system is: from the config, with what the command line says instead."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.admission_settings import admission_policy
from cluster.configuration.config import Config
from cluster.configuration.pool_config import PoolConfig
from cluster.routing.routing_policy import RoutingRules
from cluster.simulation.simulated_router import RouterTimes
from cluster.user_error import ConfigError
from scheduler.admission import AdmissionPolicy
from scheduler.pool_limits import PoolLimits


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Equal replicas. lag: as in the config."""

    num_replicas: int
    limits: PoolLimits
    lag: int


@dataclass(frozen=True, slots=True)
class SystemShape:
    """All that the simulation takes from a config. prefill None: colocated."""

    num_routers: int
    prefill: PoolShape | None
    decode: PoolShape
    admission: AdmissionPolicy
    num_host_blocks: int
    max_model_len: int
    rules: RoutingRules
    times: RouterTimes


def shape_of(
    config: Config,
    kv_bytes_per_token: int,
    replicas: tuple[int, int] | None = None,
    kv_tokens: tuple[int, int] | None = None,
) -> SystemShape:
    """replicas, kv_tokens: of prefill and decode, in place of the config's. Raises ConfigError."""
    pools = config.pools
    block_bytes = kv_bytes_per_token * config.kv.block_size
    num_prefill, num_decode = replicas or (
        pools.prefill.first_replicas if pools.prefill else 0,
        pools.decode.first_replicas,
    )
    if (num_prefill == 0) != (pools.prefill is None) or num_prefill < 0 or num_decode < 1:
        raise ConfigError(f"--replicas {num_prefill} {num_decode} does not fit layout {config.layout} of the config")
    prefill_tokens, decode_tokens = kv_tokens or (None, None)
    decode = _pool_shape("decode", pools.decode, num_decode, config, block_bytes, decode_tokens)
    policy = admission_policy(pools.decode.admission)
    host_bytes = pools.decode.host_memory_bytes
    if host_bytes is not None:
        num_host_blocks = host_bytes // block_bytes
    else:
        num_host_blocks = 0 if policy.quantile is None else decode.limits.num_blocks
    return SystemShape(
        num_routers=config.ingress.first_replicas,
        prefill=_pool_shape("prefill", pools.prefill, num_prefill, config, block_bytes, prefill_tokens)
        if pools.prefill
        else None,
        decode=decode,
        admission=policy,
        num_host_blocks=num_host_blocks,
        max_model_len=config.model.max_model_len,
        rules=RoutingRules(
            has_prefill_pool=pools.prefill is not None,
            local_prefill_max_tokens=config.routing.local_prefill_max_tokens,
            fallback_to_decode=config.routing.fallback_to_decode,
        ),
        times=RouterTimes(
            queue_s=config.ingress.queue_timeout_s,
            handoff_s=config.transfer.handoff_timeout_s,
            request_s=config.ingress.request_timeout_s,
            max_queued=config.ingress.max_queued_requests,
        ),
    )


def _pool_shape(
    name: str, pool: PoolConfig, num_replicas: int, config: Config, block_bytes: int, kv_tokens: int | None
) -> PoolShape:
    block_size = config.kv.block_size
    tokens = kv_tokens or pool.kv_capacity_tokens
    if tokens is not None:
        num_blocks = tokens // block_size
    elif pool.kv_memory_bytes is not None:
        num_blocks = pool.kv_memory_bytes // block_bytes
    else:
        raise ConfigError(
            f"pools.{name}.kv_memory_fraction: a simulation knows no GPU; give the size of the KV caches in tokens "
            "with --kv-tokens PREFILL DECODE"
        )
    if num_blocks * block_size < config.model.max_model_len:
        raise ConfigError(
            f"pools.{name}: a KV cache of {num_blocks * block_size} tokens is less than model.max_model_len "
            f"{config.model.max_model_len}; give more with --kv-tokens PREFILL DECODE"
        )
    limits = PoolLimits(num_blocks, block_size, pool.max_running_sequences, pool.max_batch_tokens)
    return PoolShape(num_replicas, limits, pool.lag)
