"""What our attention does not compute is refused by name; what it does computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.model_support import UnsupportedModel, refuse_unsupported
from replicas.settings import ModelSettings

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MistralConfig", {"sliding_window": 4096}, "sliding-window"),
    ("Gemma2Config", {}, "hybrid layers|sliding-window|soft-capping"),
    ("Gemma3TextConfig", {}, "hybrid layers|sliding-window"),
    ("DeepseekV2Config", {}, "latent"),
    ("DeepseekV3Config", {}, "latent"),
    ("GptOssConfig", {}, "hybrid layers|sinks|sliding-window"),
    ("Qwen3NextConfig", {}, "hybrid layers"),
    ("BloomConfig", {}, "biases"),
    ("MptConfig", {}, "biases"),
    ("T5Config", {}, "encoder-decoder"),
    ("BartConfig", {}, "encoder-decoder"),
    ("MambaConfig", {}, "hybrid layers"),
    (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
        "hybrid|sliding-window",
    ),
]


@pytest.mark.parametrize(("config_class", "changes", "trait"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_name(config_class: str, changes: dict[str, Any], trait: str) -> None:
    config = getattr(transformers, config_class)(**changes)
    with pytest.raises(UnsupportedModel, match=trait) as raised:
        refuse_unsupported(config)
    assert config.model_type in str(raised.value)


def test_a_classifier_is_refused() -> None:
    config = transformers.LlamaConfig(**TINY, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification"):
        refuse_unsupported(config)


SERVED: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {}),
    ("LlamaConfig", {"num_key_value_heads": 4}),
    ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    ("MistralConfig", {"sliding_window": None}),
    ("Qwen2Config", {}),
    ("Qwen3Config", {"head_dim": 16}),
    ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    ("Olmo2Config", {}),
    ("CohereConfig", {"logit_scale": 0.25}),
]


@pytest.mark.parametrize(("config_class", "changes"), SERVED, ids=[f"{row[0]}-{i}" for i, row in enumerate(SERVED)])
def test_served_models_equal_transformers(config_class: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, config_class)(**{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model(ModelSettings(str(tmp_path), "", "float32", 128, "auto", False), torch.device("cpu"))
    pool = KvPool(loaded.kv_layout(block_size=8), num_blocks=16, device=torch.device("cpu"))
    assert ModelRunner(loaded, pool, num_slots=2, max_model_len=64).self_check() < 1e-4


def test_a_model_with_its_own_attention_is_refused_at_load(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(**TINY)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="StableLmForCausalLM"):
        load_model(ModelSettings(str(tmp_path), "", "float32", 128, "auto", False), torch.device("cpu"))


def test_the_self_check_catches_what_the_config_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs a little too large, as if a model did something between softmax and projection that we do not."""
    import replicas.model.attention as attention

    config = transformers.LlamaConfig(**TINY)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    chunk = attention._attend_chunk
    monkeypatch.setattr(attention, "_attend_chunk", lambda *arguments: 1.1 * chunk(*arguments))
    loaded = load_model(ModelSettings(str(tmp_path), "", "float32", 128, "auto", False), torch.device("cpu"))
    pool = KvPool(loaded.kv_layout(block_size=8), num_blocks=16, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        ModelRunner(loaded, pool, num_slots=2, max_model_len=64).self_check()


def test_dummy_weights_are_the_same_in_every_replica(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path), "", "float32", 128, "dummy", False)
    first, second = (load_model(settings, torch.device("cpu")) for _ in range(2))
    assert first.identity == second.identity
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
