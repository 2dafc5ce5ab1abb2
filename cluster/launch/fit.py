"""Whether a config can be served by a machine: pure, from the config and the facts. Errors are what could never work;
warnings are what will be slow, or may fail with what else is going on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config.pool import PoolConfig
from cluster.config.root import Config
from cluster.launch.draft_facts import DraftFacts
from cluster.launch.machine import ENGINE_BYTES, RAY_BYTES, Gpu, Machine, show_bytes, show_cores
from cluster.launch.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Finding:
    """text: one line that begins with the key to change."""

    text: str
    is_error: bool = True


def machine_findings(config: Config, machine: Machine) -> Iterator[Finding]:
    """What is known without the model."""
    yield from _gpu_count(config, machine)
    pools = [pool for pool in config.pools.deployed().values() if pool.device == "cpu"]
    threads = sum(pool.first_replicas * pool.num_threads for pool in pools)
    if threads > max(1.0, machine.num_cores):
        limit = f" ({machine.cores_limit})" if machine.cores_limit else ""
        keys = " and ".join(f"pools.{name}.num_threads" for name in config.pools.deployed())
        text = f"{keys}: {threads} threads in all on {show_cores(machine.num_cores)}{limit}: every replica will be "
        yield Finding(f"{text}slow; give them less", is_error=False)


def model_findings(
    config: Config, machine: Machine, model: ModelFacts, draft: DraftFacts | None = None
) -> Iterator[Finding]:
    """What the model adds to that, and what drafts for it."""
    yield from _length(config, model)
    if draft is not None:
        yield from draft_findings(config, draft)
    for name, pool in config.pools.deployed().items():
        yield from _holds_one_request(f"pools.{name}", pool, config, model, draft)
        if pool.device == "cuda" and machine.gpus and all(gpu.memory_bytes for gpu in machine.gpus):
            yield from _card_memory(f"pools.{name}", pool, config, machine.gpus, model)
    yield from _host_memory(config, machine, model, draft)
    yield from _swapped_blocks(config, machine)


def _gpu_count(config: Config, machine: Machine) -> Iterator[Finding]:
    pools = {name: pool for name, pool in config.pools.deployed().items() if pool.device == "cuda"}
    if not pools:
        return
    there = len(machine.gpus)
    if not there:
        key = f"pools.{next(iter(pools))}.device"
        yield Finding(f"{key}: cuda, but this machine has no GPU to use: {machine.no_gpu or 'none found'}; set cpu")
        return
    for is_error in (True, False):
        counts = {name: pool.first_replicas if is_error else pool.most_replicas for name, pool in pools.items()}
        wanted = sum(counts[name] * pool.num_gpus for name, pool in pools.items())
        if wanted <= there:
            continue
        parts = " + ".join(f"{counts[name]} {name} x {pool.num_gpus:g}" for name, pool in pools.items())
        ending = "replicas" if is_error else "autoscaling.max_replicas"
        keys = " or ".join(f"pools.{name}.{ending}" for name in pools)
        alone = ", or set layout: two_lanes for one card" if there == 1 and len(pools) > 1 else ""
        yield Finding(f"{keys}: {wanted:g} GPUs are asked for ({parts}), {there} there; lower it{alone}", is_error)
        return


def _length(config: Config, model: ModelFacts) -> Iterator[Finding]:
    length, most = config.model.max_model_len, model.longest_request()
    if most is None or length <= most:
        return
    text = (
        f"model.max_model_len: {length} is more than {config.model.name} can do, {most} tokens; expected at most {most}"
    )
    if model.step_reach and model.step_reach[1] == most != model.max_positions:
        text += f" (beyond, its {model.step_reach[0]} positions would let requests change each other's texts)"
    yield Finding(text)


def draft_findings(config: Config, draft: DraftFacts) -> Iterator[Finding]:
    """What is wrong with what drafts."""
    source, length, most = config.speculative.model, config.model.max_model_len, draft.facts.max_positions
    if draft.unlike:
        yield Finding(
            f"speculative.model: {source} has other tokens than {config.model.name}: {draft.unlike}; choose a model of "
            "the same family, or set method: ngram"
        )
    if config.speculative.method == "draft_model" and most is not None and most < length:
        text = f"speculative.model: {source} reaches {most} tokens, model.max_model_len is {length}: beyond them "
        yield Finding(f"{text}nothing is drafted", is_error=False)


def _draft_bytes(config: Config, draft: DraftFacts | None) -> tuple[int, int]:
    """Of all replicas: its weights, and its KV beside the served model's. A draft model has as many blocks as that
    where answers are decoded; a head has a layer of each block of every pool. Of kv_memory_bytes both are a part."""
    if draft is None:
        return 0, 0
    pools = [pool for name, pool in config.pools.deployed().items() if _drafts_in(name, config)]
    num_tokens = sum(pool.first_replicas * (pool.kv_capacity_tokens or 0) for pool in pools)
    num_replicas = sum(pool.first_replicas for pool in pools)
    weights = num_replicas * draft.facts.weights_bytes(config.model.dtype)
    return weights, num_tokens * _draft_kv_bytes_per_token(config, draft)


def _drafts_in(pool: str, config: Config) -> bool:
    """Whether a pool's replicas have what drafts."""
    return config.speculative.method == "eagle3" or pool == "decode"


def _draft_kv_bytes_per_token(config: Config, draft: DraftFacts) -> int:
    is_head = config.speculative.method == "eagle3"
    return draft.facts.kv_bytes_per_token(config.kv_dtype if is_head else config.model.dtype)


def _holds_one_request(
    key: str, pool: PoolConfig, config: Config, model: ModelFacts, draft: DraftFacts | None
) -> Iterator[Finding]:
    per_token = model.kv_bytes_per_token(config.kv_dtype)
    if pool.kv_memory_bytes is None or not per_token:
        return
    if draft is not None and _drafts_in(key.removeprefix("pools."), config):
        per_token += _draft_kv_bytes_per_token(config, draft)
    block_size, length = config.kv.block_size, config.model.max_model_len
    needed = -(-length // block_size) * block_size * per_token
    if pool.kv_memory_bytes < needed:
        yield Finding(
            f"{key}.kv_memory_bytes: {pool.kv_memory_bytes} bytes cannot hold one request of model.max_model_len "
            f"{length} in {config.kv_dtype}; expected at least {needed} here, or a shorter one"
        )


def _kv_bytes(pool: PoolConfig, config: Config, model: ModelFacts) -> int:
    """Of one replica; 0 for a share of a card's memory."""
    if pool.kv_capacity_tokens is not None:
        return pool.kv_capacity_tokens * model.kv_bytes_per_token(config.kv_dtype)
    return pool.kv_memory_bytes or 0


def _size_key(pool: PoolConfig) -> str:
    return "kv_capacity_tokens" if pool.kv_capacity_tokens is not None else "kv_memory_bytes"


def _host_memory(config: Config, machine: Machine, model: ModelFacts, draft: DraftFacts | None) -> Iterator[Finding]:
    """Weights and KV of all replicas on CPUs, and of what drafts there."""
    pools = {name: pool for name, pool in config.pools.deployed().items() if pool.device == "cpu"}
    weights = model.weights_bytes(config.model.dtype)
    kv = {name: pool.first_replicas * _kv_bytes(pool, config, model) for name, pool in pools.items()}
    num_replicas = sum(pool.first_replicas for pool in pools.values())
    of_draft = sum(_draft_bytes(config, draft)) if config.pools.decode.device == "cpu" else 0
    needed = num_replicas * weights + sum(kv.values()) + of_draft
    beside = RAY_BYTES + num_replicas * ENGINE_BYTES
    if not pools or needed + beside <= machine.available_bytes:
        return
    is_error = needed > machine.memory_bytes
    room = machine.memory_bytes if is_error else machine.available_bytes
    if num_replicas * weights > room:
        key, fix = "model.source", _less_weights(config)
    else:
        largest = max(kv, key=lambda name: kv[name])
        key, fix = f"pools.{largest}.{_size_key(pools[largest])}", "give less"
    limit = f" ({machine.memory_limit})" if machine.memory_limit else ""
    sums = f"weights {num_replicas} x {show_bytes(weights)} + KV cache {show_bytes(sum(kv.values()))}"
    sums += f" + drafts {show_bytes(of_draft)}" if of_draft else ""
    has = f"has {show_bytes(room)} of memory{limit}" if is_error else f"has {show_bytes(room)} of memory free now"
    also = "" if is_error else f", beside some {show_bytes(beside)} of everything else"
    yield Finding(f"{key}: {sums} = {show_bytes(needed)}{also}, but this machine {has}; {fix}", is_error)


def _swapped_blocks(config: Config, machine: Machine) -> Iterator[Finding]:
    """What the keys ask for, of blocks that leave the KV cache: it is all taken at the start."""
    sizes = {
        name: pool.first_replicas * (pool.host_memory_bytes or 0) for name, pool in config.pools.deployed().items()
    }
    if (needed := sum(sizes.values())) > machine.available_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        is_error = needed > machine.memory_bytes
        room = machine.memory_bytes if is_error else machine.available_bytes
        free = "" if is_error else " free now"
        text = f"pools.{largest}.host_memory_bytes: {show_bytes(needed)} for all replicas, but this machine has "
        yield Finding(f"{text}{show_bytes(room)} of memory{free}; give less", is_error)


def describe_memory(config: Config, machine: Machine, model: ModelFacts, draft: DraftFacts | None = None) -> str:
    """What weights and KV weigh, beside what the machine has, in a line."""
    pools = config.pools.deployed()
    weights = model.weights_bytes(config.model.dtype)
    kv = sum(pool.first_replicas * _kv_bytes(pool, config, model) for pool in pools.values())
    num_replicas = sum(pool.first_replicas for pool in pools.values())
    scheme = f" in {model.scheme}" if model.scheme else ""
    parts = [
        f"weights {num_replicas} x {show_bytes(weights)}{scheme}"
        if weights
        else "weights not known before they are loaded"
    ]
    if kv:
        parts.append(f"KV cache {show_bytes(kv)}{' in fp8' if config.kv_dtype == 'fp8' else ''}")
    draft_weights, draft_kv = _draft_bytes(config, draft)
    if draft is not None:
        name = "head" if config.speculative.method == "eagle3" else "draft model"
        parts.append(f"{name} {show_bytes(draft_weights)}, its KV cache {show_bytes(draft_kv)}")
    if any(pool.device == "cuda" for pool in pools.values()) and machine.gpus:
        card = min(gpu.memory_bytes for gpu in machine.gpus)
        has = f"{len(machine.gpus)} x {show_bytes(card)} on GPUs" if card else f"{len(machine.gpus)} GPUs"
    else:
        has = f"{show_bytes(machine.memory_bytes)}, {show_bytes(machine.available_bytes)} of it free now"
    return f"{' + '.join(parts)}; this machine has {has}"


def _less_weights(config: Config) -> str:
    ways = []
    if config.layout == "split":
        ways.append("layout: colocated, which has one copy of them")
    if config.model.dtype == "float32":
        ways.append("model.dtype: bfloat16")
    return f"serve a smaller model{''.join(f', or set {way}' for way in ways)}"


def _card_memory(
    key: str, pool: PoolConfig, config: Config, gpus: tuple[Gpu, ...], model: ModelFacts
) -> Iterator[Finding]:
    """One replica on the smallest card, beside those that share it."""
    card = min(gpu.memory_bytes for gpu in gpus)
    weights, per_token = model.weights_bytes(config.model.dtype), model.kv_bytes_per_token(config.kv_dtype)
    sharing = max(1, int(1 / pool.num_gpus)) if pool.num_gpus else 1
    free = card / sharing - weights
    length = config.model.max_model_len
    of_each = f"{show_bytes(card / sharing)} of a card" if sharing > 1 else f"a card of {show_bytes(card)}"
    if weights and free <= 0:
        kind = f" in {config.model.dtype}"
        yield Finding(
            f"model.source: weights of {show_bytes(weights)}{kind} do not fit on {of_each}; serve a smaller model"
        )
    elif pool.kv_memory_fraction is not None:
        needed = length * per_token
        if needed > free * pool.kv_memory_fraction:
            held = int(free * pool.kv_memory_fraction / per_token)
            yield Finding(
                f"model.max_model_len: {length} tokens take {show_bytes(needed)} of KV cache, but {key} has "
                f"{show_bytes(free * pool.kv_memory_fraction)} for it ({of_each}, weights {show_bytes(weights)}, "
                f"kv_memory_fraction {pool.kv_memory_fraction:g}); expected at most about {held}"
            )
    elif (kv := _kv_bytes(pool, config, model)) > free:
        yield Finding(
            f"{key}.{_size_key(pool)}: a KV cache of {show_bytes(kv)} and weights of {show_bytes(weights)} do not fit "
            f"on {of_each}; expected at most {show_bytes(max(free, 0))} for the KV cache"
        )
