"""`splitserve check` on wrong configs: one line each that names the key and the fix, before Ray or torch load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
POOL = {"kv_capacity_tokens": 4096}
SCALING = {"min_replicas": 0, "max_replicas": 4}
GPU = {"device": "cuda", "num_gpus": 1, "kv_memory_fraction": 0.9}

# What is changed in a config of two pools, by dotted key; then the only line of the answer, from the key on.
WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown key": (
        {"pools.decode.replica": 2},
        'pools.decode.replica: unknown key; did you mean "replicas"?',
    ),
    "unknown key of autoscaling": (
        {"pools.decode.autoscaling": SCALING | {"upscale_delay": 3}},
        'pools.decode.autoscaling.upscale_delay: unknown key; did you mean "upscale_delay_s"?',
    ),
    "unknown objective": ({"slo.ttft_ms": 500}, 'slo.ttft_ms: unknown key; did you mean "ttft_s"?'),
    "key in the wrong place": (
        {"pools.target_requests": 10},
        'pools.target_requests: unknown key here; "target_requests" belongs under ingress.autoscaling',
    ),
    "number in quotes": ({"server.port": "8000"}, 'server.port: "8000" is text: write the number without quotes'),
    "layout without its pool": (
        {"layout": "colocated"},
        "pools.prefill: layout colocated deploys only the decode pool, which prefills too: remove pools.prefill",
    ),
    "memory for less than one request": (
        {"pools.decode.kv_capacity_tokens": 1024},
        "pools.decode.kv_capacity_tokens: 1024 tokens cannot hold one request of model.max_model_len 2048",
    ),
    "bytes for less than one request": (
        {"pools.prefill": {"kv_memory_bytes": 50_000_000}},
        "pools.prefill.kv_memory_bytes: 50000000 bytes cannot hold one request of model.max_model_len 2048 in float32; "
        "expected at least 94371840",
    ),
    "two sizes": (
        {"pools.decode.kv_memory_bytes": 10**9},
        "pools.decode: kv_capacity_tokens and kv_memory_bytes are given; expected exactly one of",
    ),
    "share of no GPU": (
        {"pools.decode": {"kv_memory_fraction": 0.9}},
        "pools.decode.kv_memory_fraction: 0.9 is a share of GPU memory, but device is cpu",
    ),
    "pools that cannot exchange KV": (
        {"pools.decode": GPU},
        "pools.prefill.device: cpu cannot hand its KV cache to pools.decode.device cuda; expected cuda in both",
    ),
    "GPUs that exchange KV over loopback only": (
        {"pools.decode": GPU, "pools.prefill": GPU, "transfer.net_devices": "lo"},
        'transfer.net_devices: "lo" leaves replicas on GPUs only loopback to exchange KV; expected the network devices',
    ),
    "no GPU for cuda": (
        {"pools.decode": GPU, "pools.prefill": GPU | {"num_gpus": 0}},
        "pools.prefill.num_gpus: 0 with device cuda: no GPU would be visible; expected more than 0",
    ),
    "fewest over most": (
        {"pools.decode.autoscaling": {"min_replicas": 5, "max_replicas": 4}},
        "pools.decode.autoscaling.min_replicas: 5 is more than max_replicas, 4; expected at most that",
    ),
    "no bound": (
        {"pools.decode.autoscaling": {"min_replicas": 1}},
        "pools.decode.autoscaling.max_replicas: missing; expected a whole number from 1 to 1024",
    ),
    "start outside the bounds": (
        {"pools.prefill.autoscaling": SCALING | {"initial_replicas": 9}},
        "pools.prefill.autoscaling.initial_replicas: 9 is outside the bounds; expected 0 (min_replicas) to 4",
    ),
    "replicas beside autoscaling": (
        {"pools.prefill.autoscaling": SCALING, "pools.prefill.replicas": 2},
        "pools.prefill.replicas: 2 is given beside pools.prefill.autoscaling, which decides the number: remove one",
    ),
    "no ingress left": (
        {"ingress.autoscaling": {"min_replicas": 0, "max_replicas": 2}},
        "ingress.autoscaling.min_replicas: 0 is too small; expected a whole number from 1 to 256",
    ),
    "too full": (
        {"pools.decode.autoscaling": SCALING | {"target_utilization": 1.2}},
        "pools.decode.autoscaling.target_utilization: 1.2 is too large; expected a number from 0.05 to 1",
    ),
    "ratios crossed": (
        {"pools.min_prefill_decode_ratio": 4.0, "pools.max_prefill_decode_ratio": 2.0},
        "pools.min_prefill_decode_ratio: 4 is more than pools.max_prefill_decode_ratio, 2; expected at most that",
    ),
    "cold start longer than a request": (
        {"pools.decode.autoscaling": SCALING, "ingress.cold_start_timeout_s": 900.0},
        "ingress.cold_start_timeout_s: 900 s is longer than ingress.request_timeout_s, 600 s; expected at most that",
    ),
    "nobody may wait for a cold start": (
        {"pools.decode.autoscaling": SCALING, "ingress.max_queued_requests": 0},
        "ingress.max_queued_requests: 0: nothing may wait, so a pool with autoscaling.min_replicas 0 would never start",
    ),
    "more replicas than CPUs": (
        {"pools.decode.autoscaling": {"max_replicas": 8}, "ray.num_cpus": 6},
        "ray.num_cpus: 6 is less than all replicas reserve, 10: some would never start; expected at least that",
    ),
    "wait longer than a request": (
        {"ingress.queue_timeout_s": 700.0},
        "ingress.queue_timeout_s: 700 s is longer than ingress.request_timeout_s, 600 s; expected at most that",
    ),
    "isolation by keys that nobody asks for": (
        {"prefix_cache.isolation": "key"},
        'prefix_cache.isolation: "key" without API keys: nobody is told apart; set auth.api_keys_file or '
        "auth.api_keys_env, or, behind a gateway that knows the clients, isolation: client and fairness.by",
    ),
    "isolation of clients that are all one": (
        {"prefix_cache.isolation": "client"},
        'prefix_cache.isolation: "client" with fairness.by none: all are one client; set fairness.by to api_key',
    ),
    "unknown isolation": (
        {"prefix_cache.isolation": "keys"},
        'prefix_cache.isolation: "keys" is not allowed; did you mean "key"? Expected "auto", "none", "client"',
    ),
    "prefix cache by a word": (
        {"prefix_cache.enabled": "off"},
        'prefix_cache.enabled: "off" is text; expected true or false',
    ),
    "choices that never run at once": (
        {"pools.decode.max_running_sequences": 4},
        "limits.max_choices: 8 choices can never run at once with pools.decode.max_running_sequences 4",
    ),
}

# Checks every file and says what came of it, and which heavy packages were loaded for it.
_PROGRAM = """
import contextlib, io, json, sys
from cluster.serving.command_line import main
answers = []
for file in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(["check", file])
    answers.append([code, output.getvalue(), errors.getvalue()])
heavy = sorted({"ray", "torch", "transformers", "numpy", "fastapi", "cluster.simulation.command"} & set(sys.modules))
print(json.dumps([answers, heavy]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("wrong")
    files = []
    for number, (changes, _) in enumerate(WRONG.values()):
        values: dict[str, Any] = {"pools": {"prefill": dict(POOL), "decode": dict(POOL)}}
        for dotted, value in changes.items():
            *sections, name = dotted.split(".")
            reduce(lambda place, section: place.setdefault(section, {}), sections, values)[name] = value
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(values, sort_keys=False))
    command = [sys.executable, "-c", _PROGRAM, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found, heavy = json.loads(done.stdout)
    return {"heavy": heavy, **{name: (file, *answer) for name, file, answer in zip(WRONG, files, found, strict=True)}}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_gets_one_line_that_names_the_key_and_the_fix(name: str, answers: dict[str, Any]) -> None:
    file, code, output, errors = answers[name]
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1, errors
    assert errors.startswith(f"{file}: {WRONG[name][1]}"), errors


def test_none_of_them_loads_ray_or_torch(answers: dict[str, Any]) -> None:
    assert len(WRONG) >= 20
    assert answers["heavy"] == []
