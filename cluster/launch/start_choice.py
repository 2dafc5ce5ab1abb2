"""With what `splitserve serve MODEL` serves it: one pure function, from what the machine and the model are and what the
user said to the values of a config. Whatever the user said stands; the rest follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.launch.machine import ENGINE_BYTES, RAY_BYTES, Machine, show_bytes
from cluster.launch.model_facts import ModelFacts
from cluster.user_error import ConfigError

# Of a CPU's server: enough for chats. Of a card's: most prompts, with room for others beside.
_CPU_LENGTH, _GPU_LENGTH = 2_048, 32_768
# Requests of full length that a pool's KV cache holds on a CPU, memory permitting; of a pool that is alone all of them.
_CPU_REQUESTS = {"prefill": 4, "decode": 8}
# More threads than these wait for each other more than they compute, at the few tokens of a decode step.
_MOST_THREADS = 16
_GPU_THREADS = 4
_BLOCK_SIZE = 16
# Of the memory that is free: the rest is for what the user does beside.
_MEMORY_SHARE = 0.8
_GPU_MEMORY_SHARE = 0.9
# Cards from here on compute bfloat16.
_BFLOAT16_CAPABILITY = (8, 0)
_GPU_POOLS: Mapping[str, Mapping[str, int]] = {
    "prefill": {"max_batch_tokens": 2_048, "max_running_sequences": 64},
    "decode": {"max_batch_tokens": 2_304, "max_running_sequences": 256},
}
_SIZES = ("kv_capacity_tokens", "kv_memory_bytes", "kv_memory_fraction")


@dataclass(frozen=True, slots=True)
class Said:
    """What the user said. source: as in model.source. prefill, decode: numbers of replicas. settings: by dotted key."""

    source: str
    prefill: int | None = None
    decode: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> Any:
        """The number that was said; None without one. What is none is refused by the config, with the key."""
        value = self.settings.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None

    def text(self, key: str) -> str | None:
        value = self.settings.get(key)
        return value if isinstance(value, str) else None

    def kv_dtype(self, dtype: str) -> str:
        """Of the KV cache of a model of this type."""
        said = self.text("kv.dtype")
        return dtype if said is None or said == "auto" else said

    def has_size(self, pool: str) -> bool:
        return any(f"pools.{pool}.{size}" in self.settings for size in _SIZES)


@dataclass(frozen=True, slots=True)
class StartChoice:
    """why_*: in few words. replicas, kv: by pool; kv has the key that sizes it, or nothing where the user gave one."""

    device: str
    why_device: str
    layout: str
    why_layout: str
    dtype: str
    why_dtype: str  # empty for what is usual
    max_model_len: int
    kv_dtype: str  # "fp8", or the model's
    replicas: Mapping[str, int]
    num_threads: int
    kv: Mapping[str, Mapping[str, Any]]

    @property
    def num_engines(self) -> int:
        return sum(self.replicas.values())

    def values(self, source: str) -> dict[str, Any]:
        """A config, as of a YAML file."""
        values: dict[str, Any] = {
            "model": {"source": source, "dtype": self.dtype, "max_model_len": self.max_model_len},
            "layout": self.layout,
            "pools": {name: self._pool(name) for name in self.replicas},
        }
        if self.device == "cpu" and self.layout == "split":
            values["transfer"] = {"handoff_timeout_s": 120.0}  # long prompts take long on a CPU
        return values

    def _pool(self, name: str) -> dict[str, Any]:
        pool = {"replicas": self.replicas[name], "device": self.device, "num_threads": self.num_threads}
        if self.device == "cuda":
            pool |= {"num_gpus": 1.0, "lag": 1, **_GPU_POOLS[name]}
        return pool | dict(self.kv[name])


def choose(machine: Machine, model: ModelFacts, said: Said) -> StartChoice:
    """Pure. Raises ConfigError where what was said contradicts itself."""
    device = said.text("pools.decode.device") or said.text("pools.prefill.device")
    if device is not None:
        why = "as you said"
    elif machine.gpus:
        device, why = "cuda", _describe_cards(machine)
    else:
        device, why = "cpu", machine.no_gpu or "no GPU found"
    return (_for_gpus if device == "cuda" else _for_cpus)(machine, model, said, why)


def _describe_cards(machine: Machine) -> str:
    first = machine.gpus[0]
    memory = f", {show_bytes(first.memory_bytes)} each" if first.memory_bytes else ""
    return f"{len(machine.gpus)} x {first.name}{memory}"


def _said_layout(said: Said, single: str) -> str | None:
    """None: nothing that was said decides it. single: the one of a single pool."""
    layout = said.text("layout")
    if layout == "split" and said.prefill == 0:
        raise ConfigError("--prefill 0: layout split needs a prefill replica; give --prefill 1, or leave layout out")
    if layout in ("colocated", "two_lanes") and said.prefill:
        raise ConfigError(f"--prefill {said.prefill}: layout {layout} has no prefill pool; leave one of the two out")
    if layout is not None or said.prefill == 0:
        return layout or single
    is_split = said.prefill or any(key.startswith("pools.prefill.") for key in said.settings)
    return "split" if is_split else None


def _replicas(said: Said, layout: str, num_cards: int = 0) -> dict[str, int]:
    """By pool. Of several cards one computes prompts unless more are asked for: a prompt takes a part of a second of a
    card, and a stream holds its memory for many. --prefill shifts cards, where prompts are long and answers short.
    """
    prefill = said.number("pools.prefill.replicas") or said.prefill
    decode = said.number("pools.decode.replicas") or said.decode
    if layout != "split":
        return {"decode": decode or max(1, num_cards)}
    prefill = prefill or (max(1, num_cards - decode) if decode and num_cards else 1)
    return {"prefill": prefill, "decode": decode or max(1, num_cards - prefill)}


def _for_cpus(machine: Machine, model: ModelFacts, said: Said, why_device: str) -> StartChoice:
    room = machine.available_bytes * _MEMORY_SHARE - RAY_BYTES
    dtype = said.text("model.dtype") or "float32"

    def fits(layout: str) -> bool:
        return sum(_replicas(said, layout).values()) * (model.weights_bytes(dtype) + ENGINE_BYTES) <= room

    layout, why = _said_layout(said, single="colocated"), "as you said"
    if layout is None:
        layout, why = "split", "prompts do not hold up streams"
        if not fits(layout):
            layout, why = "colocated", f"no memory for a second copy of {show_bytes(model.weights_bytes(dtype))}"
    why_dtype = ""
    if not fits(layout) and said.text("model.dtype") is None:
        why_dtype, dtype = f"no memory for {show_bytes(model.weights_bytes(dtype))}", "bfloat16"
    kv_dtype = said.kv_dtype(dtype)
    replicas = _replicas(said, layout)
    num_engines = sum(replicas.values())
    choice = StartChoice(
        device="cpu",
        why_device=why_device,
        layout=layout,
        why_layout=why,
        dtype=dtype,
        why_dtype=why_dtype,
        max_model_len=_length(said, model, kv_dtype, _CPU_LENGTH),
        kv_dtype=kv_dtype,
        replicas=replicas,
        num_threads=max(1, min(_MOST_THREADS, int(machine.num_cores // num_engines))),
        kv={},
    )
    room_for_kv = room - num_engines * (model.weights_bytes(dtype) + ENGINE_BYTES)
    return replace(choice, kv=_cpu_sizes(said, choice, model.kv_bytes_per_token(kv_dtype), room_for_kv))


def _cpu_sizes(said: Said, choice: StartChoice, per_token: int, room: float) -> dict[str, dict[str, Any]]:
    """Of each pool: the usual number of requests, or as many as there is memory for, at least one."""
    length = choice.max_model_len
    is_alone = len(choice.replicas) == 1
    requests = {name: sum(_CPU_REQUESTS.values()) if is_alone else _CPU_REQUESTS[name] for name in choice.replicas}
    needed = sum(choice.replicas[name] * num * length * per_token for name, num in requests.items())
    part = min(1.0, max(room, 0.0) / needed) if needed else 1.0
    block = int(said.number("kv.block_size") or _BLOCK_SIZE)
    sizes: dict[str, dict[str, Any]] = {}
    for name, num in requests.items():
        num_blocks = max(math.ceil(length / block), int(num * length * part / block))
        sizes[name] = {} if said.has_size(name) else {"kv_capacity_tokens": num_blocks * block}
    return sizes


def _for_gpus(machine: Machine, model: ModelFacts, said: Said, why_device: str) -> StartChoice:
    num_cards = len(machine.gpus)
    layout, why = _said_layout(said, single="two_lanes"), "as you said"
    if layout is None and num_cards >= 2:
        layout, why = "split", "prompts have cards of their own, so they do not hold up streams"
    elif layout is None:
        layout, why = "two_lanes", "one card does both, side by side"
    replicas = _replicas(said, layout, num_cards)
    is_old = any((0, 0) < gpu.capability < _BFLOAT16_CAPABILITY for gpu in machine.gpus)
    dtype = said.text("model.dtype") or ("float16" if is_old else "bfloat16")
    kv_dtype, fraction = said.kv_dtype(dtype), said.number("pools.decode.kv_memory_fraction") or _GPU_MEMORY_SHARE
    most = gpu_kv_tokens(machine, model, dtype, kv_dtype, fraction)
    return StartChoice(
        device="cuda",
        why_device=why_device,
        layout=layout,
        why_layout=why,
        dtype=dtype,
        why_dtype="these cards have no bfloat16" if dtype == "float16" and is_old else "",
        max_model_len=_length(said, model, kv_dtype, min(_GPU_LENGTH, most // 2 or _GPU_LENGTH)),  # two at once
        kv_dtype=kv_dtype,
        replicas=replicas,
        num_threads=max(1, min(_GPU_THREADS, int(machine.num_cores // sum(replicas.values())))),
        kv={name: {} if said.has_size(name) else {"kv_memory_fraction": _GPU_MEMORY_SHARE} for name in replicas},
    )


def gpu_kv_tokens(machine: Machine, model: ModelFacts, dtype: str, kv_dtype: str, fraction: float) -> int:
    """Tokens whose KV fits on the smallest card beside the weights, which are of dtype; 0 when that is not known, or
    none do."""
    card = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
    per_token = model.kv_bytes_per_token(kv_dtype)
    free = (card - model.weights_bytes(dtype)) * fraction
    return int(free / per_token) // _BLOCK_SIZE * _BLOCK_SIZE if per_token and free > 0 else 0


def _length(said: Said, model: ModelFacts, kv_dtype: str, usual: int) -> int:
    """As said; else the usual, or what the model can do, or what is allowed for by other keys, if that is less."""
    given = said.number("model.max_model_len")
    if given is not None:
        return int(given)
    bounds = [said.number(key) for key in ("limits.max_generated_tokens", "limits.max_text_chars")]
    per_token = model.kv_bytes_per_token(kv_dtype)
    for pool in ("prefill", "decode"):
        bounds.append(said.number(f"pools.{pool}.kv_capacity_tokens"))
        num_bytes = said.number(f"pools.{pool}.kv_memory_bytes")
        if num_bytes and per_token:
            bounds.append(num_bytes // per_token // _BLOCK_SIZE * _BLOCK_SIZE)
    known = [int(bound) for bound in (*bounds, model.longest_request()) if bound]
    return min(usual, *known) if known else usual
