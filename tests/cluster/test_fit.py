"""Whether a config fits a machine: what is an error, what a warning, and that each names numbers and the key."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from cluster.config.file import config_of
from cluster.config.root import Config
from cluster.launch.fit import describe_memory, machine_findings, model_findings
from cluster.launch.machine import Gpu, Machine
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts

GB = 10**9
LAPTOP = Machine(2, 24 * GB, 20 * GB, no_gpu="no NVIDIA driver found")
CARD = Machine(16, 128 * GB, 120 * GB, (Gpu("L40S", 48 * GB, (8, 9)),))
TWO_CARDS = Machine(16, 128 * GB, 120 * GB, (Gpu("L40S", 48 * GB, (8, 9)),) * 2)
LLAMA_8B = ModelFacts(131_072, 8_030_261_248, 32 * 2 * 8 * 128)
STEP = ModelFacts(131_072, 10**6, 100, step_reach=("longrope", 4_096))

CPU_POOL = {"kv_capacity_tokens": 8192}
GPU_POOL = {"device": "cuda", "num_gpus": 1, "kv_memory_fraction": 0.9, "num_threads": 4}
ON_GPUS: dict[str, object] = {"pools.prefill": GPU_POOL, "pools.decode": GPU_POOL, "model.dtype": "bfloat16"}
ON_ONE: dict[str, object] = {
    "layout": "two_lanes", "pools.prefill": None, "pools.decode": GPU_POOL, "model.dtype": "bfloat16"
}  # fmt: skip


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {"pools": {"prefill": dict(CPU_POOL), "decode": dict(CPU_POOL)}}
    for dotted, value in changes.items():
        *sections, name = dotted.split(".")
        reduce(lambda place, section: place.setdefault(section, {}), sections, values)[name] = value
    return config_of(values)


# Machine, model, changes of a config of two pools on CPUs; then errors and warnings, as they begin, in order.
TABLE: dict[str, tuple[Machine, ModelFacts, dict[str, object], list[str], list[str]]] = {
    "all is well": (LAPTOP, BUNDLED_FACTS, {}, [], []),
    "nothing is known of the model": (LAPTOP, ModelFacts(), {}, [], []),
    "longer than the model can do": (
        LAPTOP, BUNDLED_FACTS,
        {"model.max_model_len": 8200, **{f"pools.{name}.kv_capacity_tokens": 8208 for name in ("prefill", "decode")}},
        ["model.max_model_len: 8200 is more than SmolLM2-135M-Instruct can do, 8192 tokens; expected at most 8192"],
        []),
    "positions that depend on the step": (
        LAPTOP, STEP, {"model.max_model_len": 5000},
        ["model.max_model_len: 5000 is more than SmolLM2-135M-Instruct can do, 4096 tokens; expected at most 4096 "
         "(beyond, its longrope positions would let requests change each other's texts)"], []),
    "94 GB of KV": (
        LAPTOP, BUNDLED_FACTS, {"pools.decode.kv_capacity_tokens": 2_048_000},
        ["pools.decode.kv_capacity_tokens: weights 2 x 538 MB + KV cache 94.7 GB = 95.8 GB, but this machine has "
         "24.0 GB of memory; give less"], []),
    "bytes of KV": (
        LAPTOP, BUNDLED_FACTS,
        {"pools.prefill.kv_capacity_tokens": None, "pools.prefill.kv_memory_bytes": 30 * GB},
        ["pools.prefill.kv_memory_bytes: weights 2 x 538 MB + KV cache 30.4 GB = 31.5 GB, but this machine has "], []),
    "bytes for less than a request": (
        LAPTOP, LLAMA_8B,
        {"model.dtype": "bfloat16", "pools.prefill.kv_capacity_tokens": None,
         "pools.prefill.kv_memory_bytes": 10**8, "model.load_format": "dummy"},
        ["pools.prefill.kv_memory_bytes: 100000000 bytes cannot hold one request of model.max_model_len 2048 in "
         "bfloat16; expected at least 268435456 here",
         "model.source: weights 2 x 16.1 GB"], []),
    "weights": (
        LAPTOP, LLAMA_8B, {},
        ["model.source: weights 2 x 32.1 GB + KV cache 4.3 GB = 68.5 GB, but this machine has 24.0 GB of memory; serve "
         "a smaller model, or set layout: colocated, which has one copy of them, or set model.dtype: bfloat16"], []),
    "the container's limit": (
        Machine(2, 2 * GB, 1 * GB, memory_limit="the container's limit"), BUNDLED_FACTS,
        {"pools.decode.kv_capacity_tokens": 16384},
        ["pools.decode.kv_capacity_tokens: weights 2 x 538 MB + KV cache 1.1 GB = 2.2 GB, but this machine has 2.0 GB "
         "of memory (the container's limit); give less"], []),
    "little that is free": (
        Machine(2, 24 * GB, 4 * GB), BUNDLED_FACTS, {},
        [], ["pools.prefill.kv_capacity_tokens: weights 2 x 538 MB + KV cache 755 MB = 1.8 GB, beside some 2.5 GB of "
             "everything else, but this machine has 4.0 GB of memory free now; give less"]),
    "host memory for blocks": (
        CARD, BUNDLED_FACTS, {**ON_ONE, "pools.decode": {**GPU_POOL, "host_memory_bytes": 200 * GB}},
        ["pools.decode.host_memory_bytes: 200.0 GB for all replicas, but this machine has "], []),
    "threads": (
        LAPTOP, BUNDLED_FACTS, {"pools.prefill.num_threads": 8, "pools.decode.num_threads": 8},
        [], ["pools.prefill.num_threads and pools.decode.num_threads: 16 threads in all on 2 cores: every replica will "
             "be slow; give them less"]),
    "threads of a container": (
        Machine(1.5, 24 * GB, 20 * GB, cores_limit="the container's limit"), BUNDLED_FACTS, {},
        [], ["pools.prefill.num_threads and pools.decode.num_threads: 2 threads in all on 1.5 cores (the cont"]),
    "no GPU": (
        LAPTOP, BUNDLED_FACTS, ON_GPUS,
        ["pools.prefill.device: cuda, but this machine has no GPU to use: no NVIDIA driver found; set cpu"], []),
    "one GPU for two pools": (
        CARD, BUNDLED_FACTS, ON_GPUS,
        ["pools.prefill.replicas or pools.decode.replicas: 2 GPUs are asked for (1 prefill x 1 + 1 decode x 1), 1 "
         "there; lower it, or set layout: two_lanes for one card"], []),
    "half a GPU each": (
        CARD, BUNDLED_FACTS,
        {**ON_GPUS, "pools.prefill": {**GPU_POOL, "num_gpus": 0.5}, "pools.decode": {**GPU_POOL, "num_gpus": 0.5}},
        [], []),
    "more GPUs than there are": (
        TWO_CARDS, BUNDLED_FACTS, {**ON_ONE, "pools.decode": {**GPU_POOL, "replicas": 3}},
        ["pools.decode.replicas: 3 GPUs are asked for (3 decode x 1), 2 there; lower it"], []),
    "more GPUs than it may grow to": (
        TWO_CARDS, BUNDLED_FACTS, {**ON_ONE, "pools.decode": {**GPU_POOL, "autoscaling": {"max_replicas": 3}}},
        [], ["pools.decode.autoscaling.max_replicas: 3 GPUs are asked for (3 decode x 1), 2 there; lower it"]),
    "a card": (CARD, LLAMA_8B, {**ON_ONE, "model.max_model_len": 32_768}, [], []),
    "weights for a card": (
        CARD, ModelFacts(131_072, 70 * 10**9, 80 * 2 * 8 * 128), ON_ONE,
        ["model.source: weights of 140.0 GB in bfloat16 do not fit on a card of 48.0 GB; serve a smaller model"], []),
    "a request for a card": (
        Machine(16, 128 * GB, 120 * GB, (Gpu("L4", 20 * GB),)), LLAMA_8B, {**ON_ONE, "model.max_model_len": 131_072},
        ["model.max_model_len: 131072 tokens take 17.2 GB of KV cache, but pools.decode has 3.5 GB for it (a card of "
         "20.0 GB, weights 16.1 GB, kv_memory_fraction 0.9); expected at most about 27"], []),
    "a card that does not tell its memory": (
        Machine(16, 128 * GB, 120 * GB, (Gpu("NVIDIA GB10", 0, (12, 1)),)), LLAMA_8B, ON_ONE, [], []),
    "KV for a card": (
        CARD, LLAMA_8B, {**ON_ONE, "pools.decode": {"device": "cuda", "num_gpus": 1, "kv_memory_bytes": 40 * GB}},
        ["pools.decode.kv_memory_bytes: a KV cache of 40.0 GB and weights of 16.1 GB do not fit on a card of 48.0 GB; "
         "expected at most 31.9 GB for the KV cache"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_findings(name: str) -> None:
    machine, model, changes, errors, warnings = TABLE[name]
    of = config(**changes)
    findings = [*machine_findings(of, machine), *model_findings(of, machine, model)]
    for expected, is_error in ((errors, True), (warnings, False)):
        found = [finding.text for finding in findings if finding.is_error is is_error]
        assert len(found) == len(expected), found
        for text, begin in zip(found, expected, strict=True):
            assert text.startswith(begin), text
            assert "\n" not in text


def test_memory_is_shown_beside_what_there_is() -> None:
    assert describe_memory(config(), LAPTOP, BUNDLED_FACTS) == (
        "weights 2 x 538 MB + KV cache 755 MB; this machine has 24.0 GB, 20.0 GB of it free now"
    )
    assert describe_memory(config(**ON_ONE), TWO_CARDS, LLAMA_8B) == (
        "weights 1 x 16.1 GB; this machine has 2 x 48.0 GB on GPUs"
    )
    assert describe_memory(config(), LAPTOP, ModelFacts()).startswith("weights not known before they are loaded")
