"""Bounds of autoscaling, pools that could exchange nothing and memory that holds nothing. As `conflicts`."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config.autoscaling import IngressAutoscalingConfig, PoolAutoscalingConfig
from cluster.config.conflicts import Conflict
from cluster.config.model import ModelConfig, SourceKind
from cluster.config.number_types import KV_NUMBER_BYTES
from cluster.config.pool import PoolConfig, PoolsConfig
from cluster.config.service import IngressConfig, KVConfig, TransferConfig

# Keys and values of SmolLM2-135M: 30 layers of 3 heads of 64.
_BUNDLED_KV_NUMBERS_PER_TOKEN = 30 * 2 * 3 * 64


def autoscaling_conflicts(ingress: IngressConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    sections: dict[str, PoolConfig | IngressConfig] = {f"pools.{name}": p for name, p in pools.deployed().items()}
    for key, section in {"ingress": ingress, **sections}.items():
        if section.autoscaling is not None:
            yield from _bound_conflicts(f"{key}.autoscaling", section.autoscaling)
            if "replicas" in section.model_fields_set:
                reason = f"{section.replicas} is given beside {key}.autoscaling, which decides the number: remove one"
                yield Conflict(f"{key}.replicas", reason, (f"{key}.replicas", f"{key}.autoscaling"))
    least, most = pools.min_prefill_decode_ratio, pools.max_prefill_decode_ratio
    if least > most:
        key = "pools.min_prefill_decode_ratio"
        reason = f"{least:g} is more than pools.max_prefill_decode_ratio, {most:g}; expected at most that"
        yield Conflict(key, reason, (key, "pools.max_prefill_decode_ratio"))
    yield from _cold_start_conflicts(ingress, pools)


def _bound_conflicts(key: str, autoscaling: PoolAutoscalingConfig | IngressAutoscalingConfig) -> Iterator[Conflict]:
    least, most = autoscaling.min_replicas, autoscaling.max_replicas
    if least > most:
        reason = f"{least} is more than max_replicas, {most}; expected at most that"
        yield Conflict(f"{key}.min_replicas", reason, (f"{key}.min_replicas", f"{key}.max_replicas"))
    elif isinstance(autoscaling, PoolAutoscalingConfig) and not least <= autoscaling.at_start <= most:
        reason = f"{autoscaling.at_start} is outside the bounds; expected {least} (min_replicas) to {most} "
        yield Conflict(f"{key}.initial_replicas", reason + "(max_replicas)", (key,))


def _cold_start_conflicts(ingress: IngressConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    if not any(pool.may_be_empty for pool in pools.deployed().values()):
        return
    key, whole_key = "ingress.cold_start_timeout_s", "ingress.request_timeout_s"
    wait_s, whole_s = ingress.cold_start_timeout_s, ingress.request_timeout_s
    if wait_s > whole_s:
        reason = f"{wait_s:g} s is longer than {whole_key}, {whole_s:g} s; expected at most that"
        yield Conflict(key, reason, (key, whole_key, "pools"))
    if ingress.max_queued_requests == 0:
        key = "ingress.max_queued_requests"
        reason = "0: nothing may wait, so a pool with autoscaling.min_replicas 0 would never start again; expected 1 "
        yield Conflict(key, reason + "or more, or a min_replicas of at least 1", (key, "pools"))


def pair_conflicts(model: ModelConfig, transfer: TransferConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    """A prefill and a decode replica must be able to read each other's KV memory."""
    if pools.prefill is None:
        return
    prefill, decode = pools.prefill.device, pools.decode.device
    key = "pools.prefill.device"
    if prefill != decode:
        reason = f"{prefill} cannot hand its KV cache to pools.decode.device {decode}; expected {decode} in both"
        yield Conflict(key, reason, (key, "pools.decode.device"))
    elif decode == "cuda" and transfer.net_devices == "lo":
        reason = '"lo" leaves replicas on GPUs only loopback to exchange KV; expected the network devices, or null'
        yield Conflict("transfer.net_devices", reason, ("transfer.net_devices", key, "pools.decode.device"))


def memory_conflicts(model: ModelConfig, kv: KVConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    """kv_memory_bytes holds one request of full length; known before the start of the bundled model only."""
    if model.kind is not SourceKind.BUNDLED:
        return
    dtype = model.dtype if kv.dtype == "auto" else kv.dtype
    block_bytes = _BUNDLED_KV_NUMBERS_PER_TOKEN * KV_NUMBER_BYTES[dtype] * kv.block_size
    needed = -(-model.max_model_len // kv.block_size) * block_bytes
    for name, pool in pools.deployed().items():
        key = f"pools.{name}.kv_memory_bytes"
        if pool.kv_memory_bytes is not None and pool.kv_memory_bytes < needed:
            reason = f"{pool.kv_memory_bytes} bytes cannot hold one request of model.max_model_len "
            reason += f"{model.max_model_len} in {dtype}; expected at least {needed} here, or a shorter one"
            yield Conflict(key, reason, (key, "model", "kv"))
