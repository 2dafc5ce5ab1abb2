"""What autoscaling goes by, from the config. It travels to Serve's controller as plain numbers, among the figures that
each ingress reports: the policy there has no other way to learn of a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cluster.config.autoscaling import PoolAutoscalingConfig, ScalingDelays
from cluster.config.root import Config

_PREFIX = "rules."


@dataclass(frozen=True, slots=True)
class Delays:
    """How long a need must have been there before it is followed, in seconds."""

    up_s: float
    down_s: float
    to_zero_s: float


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """utilization: how full a pool is to be, 0 to 1. A pool that does not scale has the values of one that does.

    sequences_per_replica: of decode. requests_per_ingress: open requests. ratios: prefill replicas for each decode
    replica. is_colocated: decode computes the prompts. may_scale_together: both pools scale, so ratios count.
    """

    prefill: Delays
    decode: Delays
    ingress: Delays
    prefill_utilization: float
    decode_utilization: float
    sequences_per_replica: int
    requests_per_ingress: int
    ttft_s: float
    tpot_s: float
    min_ratio: float
    max_ratio: float
    is_colocated: bool
    may_scale_together: bool

    def to_stats(self) -> dict[str, float]:
        """Flat, numbers only."""
        stats: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                stats |= {f"{_PREFIX}{name}.{key}": float(number) for key, number in value.items()}
            else:
                stats[f"{_PREFIX}{name}"] = float(value)
        return stats

    @staticmethod
    def from_stats(stats: Mapping[str, float]) -> ScalingRules:
        """Raises KeyError when a rule is missing."""

        def delays(pool: str) -> Delays:
            return Delays(*(stats[f"{_PREFIX}{pool}.{key}"] for key in ("up_s", "down_s", "to_zero_s")))

        def rule(name: str) -> float:
            return stats[_PREFIX + name]

        return ScalingRules(
            prefill=delays("prefill"),
            decode=delays("decode"),
            ingress=delays("ingress"),
            prefill_utilization=rule("prefill_utilization"),
            decode_utilization=rule("decode_utilization"),
            sequences_per_replica=int(rule("sequences_per_replica")),
            requests_per_ingress=int(rule("requests_per_ingress")),
            ttft_s=rule("ttft_s"),
            tpot_s=rule("tpot_s"),
            min_ratio=rule("min_ratio"),
            max_ratio=rule("max_ratio"),
            is_colocated=bool(rule("is_colocated")),
            may_scale_together=bool(rule("may_scale_together")),
        )


def scaling_rules(config: Config) -> ScalingRules:
    """Pure."""
    pools, ingress = config.pools, config.ingress.autoscaling
    unscaled = PoolAutoscalingConfig(max_replicas=1)
    prefill = (pools.prefill.autoscaling if pools.prefill else None) or unscaled
    decode = pools.decode.autoscaling or unscaled
    return ScalingRules(
        prefill=_delays(prefill),
        decode=_delays(decode),
        ingress=_delays(ingress or unscaled),
        prefill_utilization=prefill.target_utilization,
        decode_utilization=decode.target_utilization,
        sequences_per_replica=pools.decode.max_running_sequences,
        requests_per_ingress=ingress.target_requests if ingress else 1,
        ttft_s=config.slo.ttft_s,
        tpot_s=config.slo.tpot_s,
        min_ratio=pools.min_prefill_decode_ratio,
        max_ratio=pools.max_prefill_decode_ratio,
        is_colocated=pools.prefill is None,
        may_scale_together=prefill is not unscaled and decode is not unscaled,
    )


def _delays(scaling: ScalingDelays) -> Delays:
    to_zero_s = scaling.downscale_to_zero_delay_s if isinstance(scaling, PoolAutoscalingConfig) else 0.0
    return Delays(scaling.upscale_delay_s, scaling.downscale_delay_s, to_zero_s)
