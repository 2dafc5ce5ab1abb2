"""What is served is compared with transformers alone: a fault beside neighbours, in chunks or far away shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import replicas.model.attention as attention
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from tests.engines.random_model import save_random_model, tiny_config

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def load(folder: Path, max_model_len: int = 128, **changes: Any) -> LoadedModel:
    save_random_model(tiny_config("LlamaConfig", **changes), folder)
    return load_model(ModelSettings(str(folder), "", "float32", max_model_len, "auto", False), CPU)


def runner_of(loaded: LoadedModel, num_blocks: int = 32, num_slots: int = 4, max_model_len: int = 128) -> ModelRunner:
    return ModelRunner(loaded, KvPool(loaded.kv_layout(block_size=8), num_blocks, CPU), num_slots, max_model_len)


@pytest.mark.parametrize(
    ("num_blocks", "num_slots", "max_model_len"), [(32, 4, 128), (16, 4, 128), (16, 1, 128), (2, 2, 9), (1, 1, 1)]
)
def test_a_right_model_passes_in_every_size_of_pool(
    tmp_path: Path, num_blocks: int, num_slots: int, max_model_len: int
) -> None:
    loaded = load(tmp_path, max_model_len, rope_parameters=LLAMA3)
    assert 0.0 < self_check(runner_of(loaded, num_blocks, num_slots, max_model_len), loaded) < 1e-4


def test_what_happens_between_softmax_and_projection_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs a little too large, as if a model did something there that we do not."""
    chunk = attention._attend_chunk
    monkeypatch.setattr(attention, "_attend_chunk", lambda *arguments: 1.1 * chunk(*arguments))
    loaded = load(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM: .* differ from transformers' own"):
        self_check(runner_of(loaded), loaded)


def test_a_fault_in_decode_rows_alone_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = attention._attend_rows
    monkeypatch.setattr(attention, "_attend_rows", lambda *arguments: 1.1 * rows(*arguments))
    loaded = load(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"at position 4 of a prompt of 4 tokens"):
        self_check(runner_of(loaded), loaded)


def test_what_depends_on_neighbours_is_seen_beside_neighbours(tmp_path: Path) -> None:
    """Positions twice as far apart as soon as two prompts begin in one step: alone nothing is wrong."""
    loaded = load(tmp_path)
    num_disturbed = 0

    def disturb(module: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        nonlocal num_disturbed
        if int((named["position_ids"] == 0).sum()) > 1:
            num_disturbed += 1
            named["position_ids"] = named["position_ids"] * 2
        return arguments, named

    loaded.model.register_forward_pre_hook(disturb, with_kwargs=True)
    assert self_check(runner_of(loaded, num_slots=1), loaded) < 1e-4
    assert num_disturbed == 0
    with pytest.raises(UnsupportedModel, match="beside 2 others"):
        self_check(runner_of(loaded), loaded)
    assert num_disturbed == 1


def test_what_differs_beyond_the_trained_length_is_seen(tmp_path: Path) -> None:
    loaded = load(tmp_path, rope_parameters=LLAMA3)
    assert any(prompt.prompt_len == 66 for prompt in loaded.reference)

    def disturb(module: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        positions = named["position_ids"]
        named["position_ids"] = torch.where(positions >= 64, positions + 5, positions)
        return arguments, named

    loaded.model.register_forward_pre_hook(disturb, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="of a prompt of 66 tokens"):
        self_check(runner_of(loaded), loaded)


def test_a_long_prompt_that_would_take_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.model.reference_logits._MOST_OPERATIONS", {"cpu": 1e6})
    loaded = load(tmp_path, rope_parameters=LLAMA3)
    assert max(len(prompt.token_ids) for prompt in loaded.reference) < 64


def test_one_position_that_goes_to_another_expert_by_rounding_is_excused(tmp_path: Path) -> None:
    """In low precision, with experts; in two positions, without experts or in float32 it is a fault."""

    def check(config_class: str, dtype: str, num_disturbed: int) -> float:
        save_random_model(tiny_config(config_class, num_local_experts=4), tmp_path)
        loaded = load_model(ModelSettings(str(tmp_path), "", dtype, 128, "auto", False), CPU)
        runner = runner_of(loaded)
        left = [num_disturbed]
        compute = runner._forward

        def disturbed(plan: Any) -> torch.Tensor:
            logits = compute(plan)
            if len(logits) and left[0]:
                left[0] -= 1
                logits[0] = -logits[0]
            return logits

        runner._forward = disturbed  # type: ignore[method-assign]
        return self_check(runner, loaded)

    assert check("MixtralConfig", "bfloat16", 1) > 0.1
    for config_class, dtype, num_disturbed in [
        ("MixtralConfig", "bfloat16", 2), ("MixtralConfig", "float32", 1), ("LlamaConfig", "bfloat16", 1)
    ]:  # fmt: skip
        with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
            check(config_class, dtype, num_disturbed)


def test_the_reference_is_transformers_alone(tmp_path: Path) -> None:
    """Neither our attention nor our layers: what a model that only transformers has touched computes."""
    loaded = load(tmp_path)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert {prompt.prompt_len for prompt in loaded.reference} == {4, 11, 30}
    for prompt in loaded.reference:
        with torch.inference_mode():
            logits = alone(torch.tensor([prompt.token_ids])).logits[0, prompt.prompt_len - 1 :]
        assert torch.allclose(prompt.logits, logits, rtol=0.0, atol=1e-5)
