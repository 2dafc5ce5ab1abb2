"""What was chosen for a start, in a few lines for people, each with why."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config.model import BUNDLED_SOURCE
from cluster.launch.machine import Machine, show_bytes, show_cores
from cluster.launch.model_facts import ModelFacts
from cluster.launch.start_choice import Said, StartChoice, gpu_kv_tokens


def describe(choice: StartChoice, machine: Machine, model: ModelFacts, said: Said) -> str:
    lines = [
        ("model", _model(choice, model, said)),
        ("device", f"{choice.device}: {choice.why_device}"),
        ("layout", _layout(choice)),
        ("KV cache", _kv_type(choice) + "; ".join(_kv(choice, machine, model))),
        ("memory", _memory(choice, machine, model)),
        ("threads", _threads(choice, machine)),
    ]
    return "\n".join(f"  {name:<9} {text}" for name, text in lines)


def _model(choice: StartChoice, model: ModelFacts, said: Said) -> str:
    source = "SmolLM2-135M-Instruct (bundled)" if said.source == BUNDLED_SOURCE else said.source
    longest = model.longest_request()
    most = f" of {longest:,} that it can do" if longest and longest > choice.max_model_len else ""
    why = f" ({choice.why_dtype})" if choice.why_dtype else ""
    return f"{source}, {choice.dtype}{why}, {choice.max_model_len:,} tokens a request{most}"


def _layout(choice: StartChoice) -> str:
    replicas = ", ".join(f"{count} {name}" for name, count in choice.replicas.items())
    return f"{choice.layout} ({replicas}): {choice.why_layout}"


def _kv_type(choice: StartChoice) -> str:
    return "" if choice.kv_dtype == choice.dtype else f"{choice.kv_dtype}; "


def _kv(choice: StartChoice, machine: Machine, model: ModelFacts) -> Iterator[str]:
    per_token = model.kv_bytes_per_token(choice.kv_dtype)
    for name, size in choice.kv.items():
        tokens, fraction = size.get("kv_capacity_tokens"), size.get("kv_memory_fraction")
        if tokens:
            weight = f" = {show_bytes(tokens * per_token)}" if per_token else ""
            yield f"{name} {tokens:,} tokens{weight}, {tokens // choice.max_model_len} requests of full length"
        elif fraction:
            held = gpu_kv_tokens(machine, model, choice.dtype, choice.kv_dtype, fraction)
            about = f", about {held:,} tokens" if held else ""
            yield f"{name} {fraction:.0%} of a card's memory after the weights{about}"
        else:
            yield f"{name} as you said"


def _memory(choice: StartChoice, machine: Machine, model: ModelFacts) -> str:
    weights = model.weights_bytes(choice.dtype)
    scheme = f" in {model.scheme}" if model.scheme else ""
    parts = [f"weights {choice.num_engines} x {show_bytes(weights)}{scheme}"] if weights else []
    if choice.device == "cpu":
        limit = f", {machine.memory_limit}" if machine.memory_limit else ""
        parts.append(f"{show_bytes(machine.available_bytes)} free of {show_bytes(machine.memory_bytes)}{limit}")
    return "; ".join(parts) or "the weights are not known before they are loaded"


def _threads(choice: StartChoice, machine: Machine) -> str:
    limit = f", {machine.cores_limit}" if machine.cores_limit else ""
    engines = "1 engine" if choice.num_engines == 1 else f"{choice.num_engines} engines"
    return f"{choice.num_threads} each: {show_cores(machine.num_cores)}{limit}, {engines}"
