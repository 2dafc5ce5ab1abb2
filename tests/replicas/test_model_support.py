"""What our attention does not compute is refused by name; what it does computes what transformers computes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from replicas import hub_model
from replicas.kv.kv_pool import KvPool
from replicas.model.attention_trace import AttentionShape, trace_attention
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel, refuse_unsupported
from replicas.serving.engine_builder import build_engine
from replicas.settings import ModelSettings
from tests.engines.random_model import TINY, save_random_model, small_engine, tiny_config

CPU = torch.device("cpu")

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


def load(folder: Path, dtype: str = "float32", max_model_len: int = 128) -> LoadedModel:
    return load_model(ModelSettings(str(folder), "", dtype, max_model_len, "auto", False), CPU)


@pytest.mark.parametrize(("config_class", "changes"), SERVED, ids=[f"{row[0]}-{i}" for i, row in enumerate(SERVED)])
def test_served_models_equal_transformers(config_class: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_random_model(tiny_config(config_class, **changes), tmp_path)
    loaded = load(tmp_path)
    pool = KvPool(loaded.kv_layout(block_size=8), num_blocks=16, device=CPU)
    assert self_check(ModelRunner(loaded, pool, num_slots=3, max_model_len=128), loaded) < 1e-4


def test_a_window_that_no_layer_uses_is_no_window() -> None:
    refuse_unsupported(tiny_config("MinistralConfig", sliding_window=64, layer_types=["full_attention"] * 3))
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="sliding"):
        refuse_unsupported(tiny_config("MinistralConfig", sliding_window=64, layer_types=kinds))


def test_a_model_with_its_own_attention_is_refused_at_load(tmp_path: Path) -> None:
    save_random_model(tiny_config("StableLmConfig"), tmp_path)
    with pytest.raises(UnsupportedModel, match="StableLmForCausalLM does not let its attention be replaced"):
        load(tmp_path)


def test_a_mask_of_its_own_is_refused_in_low_precision_too(tmp_path: Path) -> None:
    """Doge weighs keys by their values: a few percent of a logit, which rounding to bfloat16 could hide."""
    save_random_model(tiny_config("DogeConfig"), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"DogeForCausalLM.*attention mask of its own"):
        load(tmp_path, "bfloat16")


@pytest.mark.parametrize(
    ("config_class", "changes", "num_kv_heads"),
    [
        ("GPTBigCodeConfig", {"multi_query": True}, 1),
        ("GPTBigCodeConfig", {"multi_query": False}, 4),
        ("JetMoeConfig", {"num_local_experts": 4, "kv_channels": 8}, 4),
        ("GPT2Config", {}, 4),
        ("LlamaConfig", {"num_key_value_heads": 2}, 2),
    ],
)
def test_kv_heads_are_those_of_real_keys(
    tmp_path: Path, config_class: str, changes: dict[str, Any], num_kv_heads: int
) -> None:
    save_random_model(tiny_config(config_class, **changes), tmp_path)
    loaded = load(tmp_path)
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (3, num_kv_heads, 8)


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(tiny_config("LlamaConfig"), dtype=torch.float32)
    before = model.config._attn_implementation
    assert trace_attention(model, 3) == AttentionShape(3, 2, 8)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("layers", "replaced", "width", "message"),
    [
        ((1,), ("k_proj", "v_proj"), 32, "keys of 2 x 8, 4 x 8 .* in unlike layers"),
        ((1,), ("v_proj",), 32, "keys of 2 x 8, values of 4 x 8"),
        ((0, 1, 2), ("k_proj", "v_proj"), 24, "4 query heads do not share 3 KV heads"),
    ],
)
def test_layers_that_one_pool_can_not_hold_are_refused(
    layers: tuple[int, ...], replaced: tuple[str, ...], width: int, message: str
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(tiny_config("LlamaConfig"), dtype=torch.float32)
    for layer, name in itertools.product(layers, replaced):
        setattr(model.model.layers[layer].self_attn, name, torch.nn.Linear(32, width, bias=False))
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM: {message}"):
        trace_attention(model, 3)


def test_fewer_calls_of_attention_than_layers_are_refused() -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(tiny_config("LlamaConfig"), dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match="called 3 times, by 3 layers; each of its 4"):
        trace_attention(model, 4)


@pytest.mark.parametrize("error", [KeyError("splitserve_paged"), TypeError("2 arguments"), RuntimeError("of shape\nx")])
def test_whatever_fails_while_loading_names_the_model_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save_random_model(tiny_config("LlamaConfig"), tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", _raising(error))
    cause = rf"{type(error).__name__}: ['\w].*"
    with pytest.raises(UnsupportedModel, match=rf"^LlamaForCausalLM \(llama\) can't be served.*{cause}$") as raised:
        load(tmp_path)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"), MemoryError()]
)
def test_no_memory_and_no_files_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save_random_model(tiny_config("LlamaConfig"), tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", _raising(error))
    with pytest.raises(type(error)) as raised:
        load(tmp_path)
    assert raised.value is error
    with pytest.raises(OSError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("stage", ["warm_up", "logits"])
def test_what_fails_before_serving_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    save_random_model(tiny_config("LlamaConfig"), tmp_path)
    monkeypatch.setattr(ModelRunner, stage, _raising(RuntimeError("shapes do not fit")))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM can't be served.*RuntimeError: shapes do not fit"):
        build_engine(small_engine("decode", tmp_path, 128), "decode-0")


def test_a_kind_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "quillon", "architectures": ["QuillonForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match="quillon"):
        load(tmp_path)


def _raising(error: Exception) -> Any:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


def test_dummy_weights_are_the_same_in_every_replica(tmp_path: Path) -> None:
    transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path), "", "float32", 128, "dummy", False)
    first, second = (load_model(settings, torch.device("cpu")) for _ in range(2))
    assert first.identity == second.identity
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_the_hub_does_not_have_is_refused_before_transformers_looks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would try for half a minute."""

    def find_on_hub(source: str, key: str) -> None:
        raise hub_model.HubRefusal(f"model.source: {source}: the Hub has no such model")

    monkeypatch.setattr(hub_model, "find_on_hub", find_on_hub)
    monkeypatch.setattr(hub_model, "copy_in_cache", lambda _: None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was looked for"))
    with pytest.raises(hub_model.HubRefusal, match="org/nothing: the Hub has no such model"):
        load_model(ModelSettings("org/nothing", "/nowhere", "float32", 64, "auto", False), CPU)
