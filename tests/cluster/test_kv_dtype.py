"""`kv.dtype: fp8` in the config: what is sized, checked, shown and simulated by the bytes that KV then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import config_of
from cluster.config.root import Config
from cluster.config.summary import summarize
from cluster.launch.choice_lines import describe
from cluster.launch.fit import describe_memory, model_findings
from cluster.launch.machine import Gpu, Machine
from cluster.launch.model_facts import BUNDLED_FACTS, ModelFacts
from cluster.launch.start_choice import Said, choose
from cluster.serving.ready_lines import ready_lines
from cluster.serving.replica_settings import engine_settings
from cluster.simulation.cost_model import CostModel, load_costs
from cluster.user_error import ConfigError

GB = 10**9
LAPTOP = Machine(2, 24 * GB, 20 * GB, no_gpu="no NVIDIA driver found")
CARD = Machine(16, 128 * GB, 120 * GB, (Gpu("L40S", 48 * GB, (8, 9)),))
LLAMA_8B = ModelFacts(131_072, 8_030_261_248, 32 * 2 * 8 * 128)
STEPS = Path(__file__).parents[2] / "benchmarks/step_times/llama-3.1-8b-h100.json"


def config(kv: dict[str, Any], **pool: Any) -> Config:
    size = pool or {"kv_capacity_tokens": 8192}
    return config_of({"kv": kv, "pools": {"prefill": {"kv_capacity_tokens": 8192}, "decode": size}})


def test_the_key_reaches_the_engines() -> None:
    fp8, auto = config({"dtype": "fp8"}), config({})
    assert (fp8.kv_dtype, auto.kv_dtype) == ("fp8", "float32")
    assert engine_settings("decode", fp8.pools.decode, fp8).kv.dtype == "fp8"
    assert engine_settings("decode", auto.pools.decode, auto).kv.dtype == "auto"
    with pytest.raises(ConfigError, match=r'kv\.dtype: "int8" is not allowed; expected "auto" or "fp8"'):
        config({"dtype": "int8"})


def test_bytes_of_kv_are_a_quarter_of_float32() -> None:
    """A request of 2,048 tokens takes 94 MB, or 24."""
    needed = 2048 * 30 * 2 * 3 * 64
    config({"dtype": "fp8"}, kv_memory_bytes=needed)
    with pytest.raises(ConfigError, match=f"model.max_model_len 2048 in fp8; expected at least {needed} here"):
        config({"dtype": "fp8"}, kv_memory_bytes=needed - 1)
    with pytest.raises(ConfigError, match=f"2048 in float32; expected at least {4 * needed} here"):
        config({}, kv_memory_bytes=needed)


def test_what_does_not_fit_in_float32_does_in_fp8() -> None:
    size = {"kv_capacity_tokens": 600_000}
    (finding,) = model_findings(config({}, **size), LAPTOP, BUNDLED_FACTS)
    assert finding.is_error
    assert not list(model_findings(config({"dtype": "fp8"}, **size), LAPTOP, BUNDLED_FACTS))
    assert "KV cache 7.0 GB in fp8;" in describe_memory(config({"dtype": "fp8"}, **size), LAPTOP, BUNDLED_FACTS)


def test_a_start_without_a_config_counts_twice_the_tokens_on_a_card() -> None:
    said = {dtype: Said("org/name", settings={"kv.dtype": dtype}) for dtype in ("auto", "fp8")}
    lines = {dtype: describe(choose(CARD, LLAMA_8B, one), CARD, LLAMA_8B, one) for dtype, one in said.items()}
    assert "about 219,296 tokens" in lines["auto"]
    assert "KV cache  fp8; decode 90% of a card's memory after the weights, about 438,608 tokens" in lines["fp8"]


def test_people_are_told() -> None:
    fp8 = config({"dtype": "fp8"})
    assert "8192 tokens in 512 blocks of 16 (4 requests of full length) in fp8" in summarize(fp8)
    replica = {"num_blocks": 512, "block_size": 16, "kv_bytes_per_token": 11_520}
    assert "KV cache   11,520 bytes a token (fp8)" in ready_lines(fp8, {"decode": [replica]})
    assert "fp8" not in summarize(config({})) + ready_lines(config({}), {"decode": [replica]})


def test_transfers_are_simulated_with_half_the_bytes() -> None:
    costs = load_costs(STEPS)
    fp8 = costs.with_kv_dtype("fp8")
    assert fp8.kv_bytes_per_token * 2 == costs.kv_bytes_per_token == 131_072
    assert fp8.read_s(8192) - costs.transfer.latency_s == (costs.read_s(8192) - costs.transfer.latency_s) / 2
    assert fp8.with_kv_dtype("bfloat16") == costs
    assert CostModel.model_validate_json(fp8.model_dump_json()) == fp8
