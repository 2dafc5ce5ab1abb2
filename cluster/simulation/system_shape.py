"""How large the simulated system is: from the config, with what the command line says instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config.admission_settings import admission_policy
from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.policies.routing_policy import RoutingRules
from cluster.same_names import by_names
from cluster.simulation.cost_model import LaneShareCosts
from cluster.simulation.draft_shape import DraftShape
from cluster.simulation.router_times import RouterTimes
from cluster.user_error import ConfigError
from replicas.pool_size import PoolTooSmall, num_host_blocks, pool_limits
from scheduler.admission import AdmissionPolicy
from scheduler.lane_split import LaneObjectives, LaneShare, ShareChooser, choose_share, estimated_shares
from scheduler.pool_limits import PoolLimits

# Of the card whose rates are known: a simulation knows none of its own.
_MEASURED_PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Equal replicas. lag: as in the config. lanes: of two, what their division aims at; None: there is one. shares:
    ways to divide a replica's card. chooser: of one of them. drafts: None: none. may_also: they may do the other
    pool's work too."""

    num_replicas: int
    limits: PoolLimits
    lag: int
    lanes: LaneObjectives | None = None
    shares: tuple[LaneShare, ...] = ()
    chooser: ShareChooser = choose_share
    drafts: DraftShape | None = None
    may_also: bool = False


@dataclass(frozen=True, slots=True)
class SystemShape:
    """All that the simulation takes from a config. prefill None: decode computes prompts."""

    num_routers: int
    prefill: PoolShape | None
    decode: PoolShape
    admission: AdmissionPolicy
    num_host_blocks: int
    max_model_len: int
    rules: RoutingRules
    times: RouterTimes
    has_prefix_cache: bool = False
    num_prefill_host_blocks: int = 0


def shape_of(
    config: Config,
    kv_bytes_per_token: int,
    replicas: tuple[int, int] | None = None,
    kv_tokens: tuple[int, int] | None = None,
    lane_shares: Sequence[LaneShareCosts] = (),
) -> SystemShape:
    """replicas, kv_tokens: of prefill and decode, in place of the config's. lane_shares: of each card; none: estimates.
    Raises ConfigError."""
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
    decode = replace(decode, drafts=DraftShape.of(config))
    policy = admission_policy(pools.decode.admission)
    host_bytes = pools.decode.host_memory_bytes
    if config.layout == "two_lanes":
        measured = tuple(LaneShare(share.processors, share.prefill_rate, share.decode_rate) for share in lane_shares)
        shares = (measured or estimated_shares(_MEASURED_PROCESSORS)) if pools.decode.device == "cuda" else ()
        decode = replace(decode, lanes=by_names(LaneObjectives, pools.decode.lanes), shares=shares)
    kept_bytes = (pools.prefill.host_memory_bytes or 0) if pools.prefill else 0
    return SystemShape(
        num_routers=config.ingress.first_replicas,
        prefill=_pool_shape("prefill", pools.prefill, num_prefill, config, block_bytes, prefill_tokens)
        if pools.prefill
        else None,
        decode=decode,
        admission=policy,
        num_host_blocks=num_host_blocks(host_bytes, policy, block_bytes, decode.limits.num_blocks),
        max_model_len=config.model.max_model_len,
        rules=by_names(RoutingRules, config.routing, config.slo, has_prefill_pool=pools.prefill is not None),
        times=by_names(RouterTimes, config.ingress, config.transfer),
        has_prefix_cache=config.prefix_cache.enabled,
        num_prefill_host_blocks=kept_bytes // block_bytes,
    )


def _pool_shape(
    name: str, pool: PoolConfig, num_replicas: int, config: Config, block_bytes: int, kv_tokens: int | None
) -> PoolShape:
    if kv_tokens:
        pool = pool.model_copy(update={"kv_capacity_tokens": kv_tokens})
    if pool.kv_capacity_tokens is None and pool.kv_memory_bytes is None:
        raise ConfigError(
            f"pools.{name}.kv_memory_fraction: a simulation knows no GPU; give the size of the KV caches in tokens "
            "with --kv-tokens PREFILL DECODE"
        )
    try:
        limits = pool_limits(pool, config.kv.block_size, block_bytes, config.model.max_model_len)
    except PoolTooSmall as error:
        raise ConfigError(f"pools.{name}: {error}, by --kv-tokens PREFILL DECODE") from error
    return PoolShape(num_replicas, limits, pool.lag, may_also=pool.may_also)
