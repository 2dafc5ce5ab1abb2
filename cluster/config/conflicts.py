"""Values that are each allowed but do not go together. Pure functions of config sections.

A conflict is reported at the key that is most likely to be changed, with the numbers. `reads` names the keys
it follows from, so that it stays silent when one of those is itself in error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config.limits import LimitsConfig
from cluster.config.model import ModelConfig
from cluster.config.pool import PoolsConfig
from cluster.config.service import (
    HAPROXY_PORTS,
    INGRESS_PORTS,
    IngressConfig,
    KVConfig,
    RayConfig,
    ServerConfig,
    TransferConfig,
)


@dataclass(frozen=True, slots=True)
class Conflict:
    """One finding: dotted key, a sentence that begins with the value or the fact, and the dotted keys it rests on."""

    key: str
    reason: str
    reads: tuple[str, ...]


def layout_conflicts(layout: str, pools: PoolsConfig) -> Iterator[Conflict]:
    reads = ("layout", "pools.prefill")
    if layout == "split" and pools.prefill is None:
        reason = "missing; layout split needs both pools: add pools.prefill, or set layout: colocated"
        yield Conflict("pools.prefill", reason, reads)
    if layout != "split" and pools.prefill is not None:
        reason = f"layout {layout} deploys only the decode pool, which prefills too: remove pools.prefill, or set "
        yield Conflict("pools.prefill", reason + "layout: split", reads)


def proxy_conflicts(server: ServerConfig) -> Iterator[Conflict]:
    """What Ray's HAProxy can't do: it finds ingresses of its own machine at 127.0.0.1."""
    if server.proxy != "haproxy":
        return
    if server.host not in ("127.0.0.1", "localhost", "0.0.0.0"):
        reason = f"{server.host} can't be had with server.proxy haproxy; expected 127.0.0.1, localhost or 0.0.0.0"
        yield Conflict("server.host", reason, ("server.host", "server.proxy"))
    if server.port in HAPROXY_PORTS.values() or server.port in INGRESS_PORTS:
        reason = f"{server.port} is one that server.proxy haproxy needs itself; expected another"
        yield Conflict("server.port", reason, ("server.port", "server.proxy"))


def size_conflicts(model: ModelConfig, kv: KVConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    """Each pool has one size, on whole blocks, that holds the longest request."""
    for name, pool in pools.deployed().items():
        key = f"pools.{name}"
        given = [size for size in _SIZES if getattr(pool, size) is not None]
        if len(given) != 1:
            found = "none is given" if not given else f"{' and '.join(given)} are given"
            reason = f"{found}; expected exactly one of {', '.join(_SIZES)}"
            yield Conflict(key, reason, tuple(f"{key}.{size}" for size in _SIZES))
        if pool.kv_memory_fraction is not None and pool.device != "cuda":
            reason = f"{pool.kv_memory_fraction} is a share of GPU memory, but device is {pool.device}; "
            reason += "expected kv_capacity_tokens or kv_memory_bytes"
            yield Conflict(f"{key}.kv_memory_fraction", reason, (f"{key}.kv_memory_fraction", f"{key}.device"))
        if pool.kv_capacity_tokens is not None:
            yield from _capacity_conflicts(f"{key}.kv_capacity_tokens", pool.kv_capacity_tokens, model, kv)


_SIZES = ("kv_capacity_tokens", "kv_memory_bytes", "kv_memory_fraction")


def _capacity_conflicts(key: str, capacity: int, model: ModelConfig, kv: KVConfig) -> Iterator[Conflict]:
    remainder = capacity % kv.block_size
    if remainder:
        below, above = capacity - remainder, capacity - remainder + kv.block_size
        choices = f"{below} or {above}" if below else f"{above}"
        reason = f"{capacity} is no multiple of kv.block_size {kv.block_size}; expected for example {choices}"
        yield Conflict(key, reason, (key, "kv.block_size"))
    if capacity < model.max_model_len:
        reason = f"{capacity} tokens cannot hold one request of model.max_model_len {model.max_model_len}; expected "
        reason += f"at least {model.max_model_len} here, or a model.max_model_len of at most {capacity}"
        yield Conflict(key, reason, (key, "model.max_model_len"))


def device_conflicts(pools: PoolsConfig) -> Iterator[Conflict]:
    for name, pool in pools.deployed().items():
        key = f"pools.{name}.num_gpus"
        reads = (key, f"pools.{name}.device")
        if pool.device == "cuda" and pool.num_gpus == 0:
            yield Conflict(key, "0 with device cuda: no GPU would be visible; expected more than 0, usually 1", reads)
        if pool.device == "cpu" and pool.num_gpus > 0:
            yield Conflict(key, f"{pool.num_gpus:g} would reserve a GPU that device cpu never uses; expected 0", reads)


def batch_conflicts(limits: LimitsConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    decode = pools.decode
    sequences_key, tokens_key = "pools.decode.max_running_sequences", "pools.decode.max_batch_tokens"
    if limits.max_choices > decode.max_running_sequences:
        reason = f"{limits.max_choices} choices can never run at once with {sequences_key} "
        reason += f"{decode.max_running_sequences}; expected at most that many"
        yield Conflict("limits.max_choices", reason, ("limits.max_choices", sequences_key))
    if decode.max_batch_tokens <= decode.max_running_sequences:
        reason = f"{decode.max_batch_tokens} leaves no room for prompts beside {sequences_key} "
        reason += f"{decode.max_running_sequences}, one token each; expected more than that"
        yield Conflict(tokens_key, reason, (tokens_key, sequences_key))


def role_conflicts(layout: str, policy: str, model: ModelConfig, pools: PoolsConfig) -> Iterator[Conflict]:
    """Replicas that may do the other pool's work need what that needs."""
    policy_key = "routing.policy"
    able = {f"pools.{name}": pool for name, pool in pools.deployed().items() if pool.may_also}
    for key, pool in able.items():
        also = f"{key}.may_also"
        if layout != "split":
            reason = (
                f"true means the other pool's work, and layout {layout} has one pool: remove it, or set layout: split"
            )
            yield Conflict(also, reason, (also, "layout"))
        if policy != "roles_by_cost":
            reason = f"true needs {policy_key} roles_by_cost, which is {policy}: only that weighs both kinds of work"
            yield Conflict(also, reason, (also, policy_key))
        most = f"{key}.max_running_sequences"
        if pool.max_running_sequences < 2:
            reason = f"with {also} one place is kept for other replicas' prompts, which leaves none for a stream here"
            yield Conflict(most, f"{reason}; expected at least 2", (most, also))
        if pool.max_batch_tokens <= pool.max_running_sequences:
            reason = (
                f"{pool.max_batch_tokens} leaves no room for prompts beside {most} {pool.max_running_sequences}, one "
            )
            reason += f"token each, and with {also} there are both; expected more than that"
            yield Conflict(f"{key}.max_batch_tokens", reason, (f"{key}.max_batch_tokens", most, also))
        capacity, longest = pool.kv_capacity_tokens, model.max_model_len
        if capacity is not None and capacity < 2 * longest:
            reason = (
                f"{capacity} tokens are less than twice model.max_model_len {longest}, and with {also} a prompt for "
            )
            reason += "another replica has room of its own; expected at least that"
            yield Conflict(
                f"{key}.kv_capacity_tokens", reason, (f"{key}.kv_capacity_tokens", "model.max_model_len", also)
            )
    if len({pool.device for pool in pools.deployed().values()}) > 1:
        for key in able:
            reason = "true, but the pools compute on different devices: what a prompt costs is taken to be alike"
            yield Conflict(
                f"{key}.may_also", reason, (f"{key}.may_also", "pools.prefill.device", "pools.decode.device")
            )


def timeout_conflicts(ingress: IngressConfig, transfer: TransferConfig) -> Iterator[Conflict]:
    """Nothing waits, and no lease lasts, longer than a whole request may live."""
    whole_key, whole_s = "ingress.request_timeout_s", ingress.request_timeout_s
    waits = {
        "ingress.queue_timeout_s": ingress.queue_timeout_s,
        "transfer.handoff_timeout_s": transfer.handoff_timeout_s,
        "transfer.lease_s": transfer.lease_s,
    }
    for key, wait_s in waits.items():
        if wait_s > whole_s:
            reason = f"{wait_s:g} s is longer than {whole_key}, {whole_s:g} s; expected at most that"
            yield Conflict(key, reason, (key, whole_key))


def limit_conflicts(model: ModelConfig, limits: LimitsConfig) -> Iterator[Conflict]:
    """A request that gives no max_tokens is not refused for its default."""
    defaults = {
        "limits.max_tokens_default_chat": limits.max_tokens_default_chat,
        "limits.max_tokens_default_completions": limits.max_tokens_default_completions,
    }
    for key, default in defaults.items():
        if default is not None and default >= model.max_model_len:
            reason = f"{default} leaves no room for a prompt in model.max_model_len {model.max_model_len}; give less"
            yield Conflict(key, reason, (key, "model.max_model_len"))
    key, most = "limits.max_generated_tokens", limits.max_generated_tokens
    if most < model.max_model_len:
        reason = f"{most} is less than model.max_model_len {model.max_model_len}, so one long answer would be refused; "
        yield Conflict(key, reason + "expected at least that", (key, "model.max_model_len"))
    key, most = "limits.max_text_chars", limits.max_text_chars
    if most < model.max_model_len:
        reason = f"{most} is less than model.max_model_len {model.max_model_len}: prompts that fit would be refused; "
        yield Conflict(key, reason + "expected at least that", (key, "model.max_model_len"))


def resource_conflicts(ray: RayConfig, needed_cpus: float) -> Iterator[Conflict]:
    if ray.num_cpus is not None and ray.num_cpus < needed_cpus:
        reason = f"{ray.num_cpus} is less than all replicas reserve, {needed_cpus:g}: some would never start; "
        reason += "expected at least that, or null"
        yield Conflict("ray.num_cpus", reason, ("ray.num_cpus", "ingress", "pools"))
