"""What a GGUF file says that is not computed here is refused, naming the file and the setting or the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter

from replicas.gguf import weights as gguf_weights
from replicas.gguf.conversion import convert
from replicas.model_support import UnsupportedModel
from tests.replicas.tiny_gguf import TinyGguf, gguf_of, tiny_model

CLASSES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "phi3": "Phi3Config", "gpt2": "GPT2Config"}
ONES = np.ones(8, dtype=np.float32)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(config_class) for name, config_class in CLASSES.items()}


def refusal(path: Path) -> str:
    """The message. Nothing is left that a next start would take for a conversion, and the next start is refused too."""
    cache_dir = path.parent / "cache"
    messages = set()
    for _ in range(2):
        with pytest.raises(UnsupportedModel) as raised:
            convert(path, cache_dir)
        messages.add(str(raised.value))
    assert [entry for entry in cache_dir.iterdir() if entry.is_dir()] == []
    (message,) = messages
    assert str(path) in message
    return message


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, "llama.rope.scaling.type is 'dynamic'"),
    ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "llama.rope.scaling.type is 'longrope'"),
    ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.5}, "llama.rope.scaling.factor is 0.5"),
    ("llama", {"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, "llama.rope.scale_linear is 2.0"),
    ("llama", {"rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha is 1000.0"),
    ("llama", {"rope.scaling.attn_factor": 1.19}, "llama.rope.scaling.attn_factor is 1.1"),
    ("llama", {"rope.scaling.new_thing": 1.0}, "llama.rope.scaling.new_thing is 1.0"),
    ("llama", {"rope.dimension_sections": [8, 4, 4, 0]}, "llama.rope.dimension_sections is [8, 4, 4, 0]"),
    ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
    ("llama", {"rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0"),
    ("llama", {"rope.freq_base_swa": 100.0}, "llama.rope.freq_base_swa is 100.0"),
    ("phi3", {"rope.dimension_count": 7}, "phi3.rope.dimension_count is 7"),
    ("phi3", {"attention.sliding_window": 511}, "phi3.attention.sliding_window is 511"),
    ("llama", {"attention.sliding_window": 64}, "llama.attention.sliding_window is 64"),
    ("llama", {"attention.sliding_window_pattern": [True, False]}, "llama.attention.sliding_window_pattern is [True"),
    ("llama", {"attention.scale": 0.5}, "llama.attention.scale is 0.5"),
    ("llama", {"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0"),
    ("llama", {"attention.max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias is 8.0"),
    ("llama", {"attention.causal": False}, "llama.attention.causal is False"),
    ("llama", {"attention.value_length": 32}, "llama.attention.value_length is 32"),
    ("llama", {"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
    ("llama", {"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
    ("llama", {"logit_scale": 8.0}, "llama.logit_scale is 8.0"),
    ("llama", {"embedding_scale": 12.0}, "llama.embedding_scale is 12.0"),
    ("llama", {"residual_scale": 0.25}, "llama.residual_scale is 0.25"),
    ("llama", {"expert_count": 8, "expert_used_count": 2}, "llama.expert_count is 8"),
    ("llama", {"pooling_type": 3}, "llama.pooling_type is 3"),
    ("llama", {"tensor_data_layout": "reference"}, "llama.tensor_data_layout is 'reference'"),
    ("llama", {"something.new": "x"}, "llama.something.new is 'x'"),
    ("llama", {"attention.head_count_kv": None}, "llama.attention.head_count_kv is 'missing'"),
    ("llama", {"attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is 'missing'"),
    ("llama", {"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv is [2, 1]"),
    ("llama", {"attention.head_count": [4, 4]}, "llama.attention.head_count is [4, 4]"),
    ("llama", {"attention.head_count": 3, "attention.key_length": None}, "llama.attention.head_count is 3"),
    ("llama", {"vocab_size": 300}, "llama.vocab_size is 300"),
    ("llama", {"feed_forward_length": 95}, "the tensor blk.0.ffn_gate.weight [96, 64]"),
    ("llama", {"attention.head_count_kv": 4}, "the tensor blk.0.attn_k.weight [32, 64]"),
    ("llama", {"block_count": 3}, "blk.2.attn_q.weight"),
    ("llama", {"block_count": 1}, "blk.1.attn_q.weight"),
    ("gpt2", {"context_length": 600}, "the tensor position_embd.weight [512, 64]"),
    ("gpt2", {"attention.head_count_kv": 2}, "gpt2.attention.head_count_kv is 2"),
    ("gpt2", {"rope.scaling.factor": 2.0}, "gpt2.rope.scaling.factor is 2.0"),
]

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
SETTINGS += [
    ("qwen2", YARN | {"rope.scaling.yarn_beta_fast": 1.0}, "qwen2.rope.scaling.yarn_beta_fast is 1.0"),
    ("qwen2", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "qwen2.rope.scaling.yarn_ext_factor is 0.5"),
    ("qwen2", YARN | {"rope.scaling.yarn_attn_factor": 0.5}, "qwen2.rope.scaling.yarn_attn_factor is 0.5"),
    ("qwen2", YARN | {"rope.scaling.yarn_log_multiplier": 0.5}, "qwen2.rope.scaling.yarn_log_multiplier is 0.5"),
    ("qwen2", YARN | {"rope.scaling.factor": 0.25}, "qwen2.rope.scaling.factor is 0.25"),
]


@pytest.mark.parametrize(("architecture", "changes", "named"), SETTINGS, ids=[row[2] for row in SETTINGS])
def test_a_setting(
    architecture: str, changes: dict[str, Any], named: str, models: dict[str, Any], tmp_path: Path
) -> None:
    gguf = gguf_of(models[architecture], architecture)
    gguf.settings |= changes
    assert named in refusal(gguf.write(tmp_path / "model.gguf"))


NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.25,
    "attention.sliding_window": 0,
    "attention.sliding_window_pattern": [False, False],
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "pooling_type": 0,
    "residual_scale": 1.0,
    "rope.dimension_count": 16,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": False,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tensor_data_layout": "Meta AI original pth",
    "vocab_size": 262,
}


def test_settings_that_change_nothing_are_taken(models: dict[str, Any], tmp_path: Path) -> None:
    """llama.cpp writes many that are not set; and whoever else writes his name into the file does no harm."""
    plain, gguf = (gguf_of(models["llama"], "llama") for _ in range(2))
    gguf.settings |= NEUTRAL
    gguf.metadata = {"mradermacher.quantized_by": "somebody", "split.count": 1, "general.type": "model"}
    folders = [
        convert(one.write(tmp_path / name / "model.gguf"), tmp_path) for name, one in (("plain", plain), ("all", gguf))
    ]
    assert folders[0] != folders[1]
    first, second = ((folder / "config.json").read_text() for folder in folders)
    assert first == second


def without(name: str) -> Callable[[TinyGguf], None]:
    return lambda gguf: gguf.tensors.__delitem__(name)


def having(name: str, values: np.ndarray[Any, Any]) -> Callable[[TinyGguf], None]:
    return lambda gguf: gguf.tensors.__setitem__(name, values)


def having_both(gguf: TinyGguf) -> None:
    gguf.tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    gguf.settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}


TENSORS: list[tuple[str, str, Callable[[TinyGguf], None], str]] = [
    (
        "one is missing",
        "llama",
        without("blk.1.attn_q.weight"),
        "the tensor blk.1.attn_q.weight is missing",
    ),
    ("a norm is missing", "llama", without("output_norm.weight"), "output_norm.weight is missing"),
    ("fewer rows than tokens", "llama", having("token_embd.weight", np.ones((200, 64), np.float32)), "262 tokens"),
    ("no embedding", "llama", without("token_embd.weight"), "token_embd.weight is missing"),
    ("a bias is missing", "qwen2", without("blk.0.attn_k.bias"), "blk.0.attn_k.bias is missing"),
    ("a bias too many", "qwen2", having("blk.0.attn_output.bias", np.ones(64, np.float32)), "blk.0.attn_output.bias"),
    ("half of the biases", "llama", having("blk.0.attn_q.bias", np.ones(64, np.float32)), "blk.0.attn_k.bias"),
    ("a norm too many", "llama", having("blk.0.attn_q_norm.weight", np.ones(16, np.float32)), "blk.0.attn_q_norm"),
    ("an adapter's", "llama", having("blk.0.attn_q.weight.lora_a", np.ones((4, 64), np.float32)), "lora_a"),
    ("wrong shape", "llama", having("blk.0.attn_v.weight", np.ones((64, 32), np.float32)), "attn_v.weight [64, 32]"),
    ("positions too few", "gpt2", having("position_embd.weight", np.ones((9, 64), np.float32)), "position_embd.weight"),
    ("too few factors", "llama", having("rope_freqs.weight", ONES[:7] * 2), "the tensor rope_freqs.weight [7]"),
    ("too many factors", "llama", having("rope_freqs.weight", np.ones(16, np.float32)), "rope_freqs.weight [16]"),
    ("factors in float16", "llama", having("rope_freqs.weight", ONES.astype(np.float16)), "rope_freqs.weight [8]"),
    ("other factors", "llama", having("rope_freqs.weight", np.geomspace(1, 8, 8, dtype=np.float32)), "rope_freqs"),
    ("factors below one", "llama", having("rope_freqs.weight", ONES / 2), "rope_freqs.weight"),
    ("a factor that is no number", "llama", having("rope_freqs.weight", ONES * np.nan), "rope_freqs.weight"),
    ("factors and a scale", "llama", having_both, "llama.rope.scaling.type is 'linear'"),
    ("factors of a qwen2", "qwen2", having("rope_freqs.weight", ONES), "rope_freqs.weight"),
    ("long factors", "phi3", having("rope_factors_long.weight", ONES * 4), "rope_factors_long.weight [8]"),
    ("short factors", "phi3", having("rope_factors_short.weight", ONES * 2), "rope_factors_short.weight [8]"),
]


@pytest.mark.parametrize(("what", "architecture", "change", "named"), TENSORS, ids=[row[0] for row in TENSORS])
def test_tensors(
    what: str,
    architecture: str,
    change: Callable[[TinyGguf], None],
    named: str,
    models: dict[str, Any],
    tmp_path: Path,
) -> None:
    gguf = gguf_of(models[architecture], architecture)
    change(gguf)
    assert named in refusal(gguf.write(tmp_path / "model.gguf"))


def test_a_weight_that_the_reader_makes_up_is_refused(
    models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the tensor names ever agree and transformers still find no weight."""
    monkeypatch.setattr(gguf_weights, "check_tensors", lambda *_: None)
    gguf = gguf_of(models["llama"], "llama")
    del gguf.tensors["blk.1.attn_q.weight"]
    message = refusal(gguf.write(tmp_path / "model.gguf"))
    assert "missing keys: model.layers.1.self_attn.q_proj.weight" in message


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.03, 0.05, 0.3, 0.9, 0.9999])
def test_a_file_that_was_cut_short(part: float, models: dict[str, Any], tmp_path: Path) -> None:
    path = gguf_of(models["llama"], "llama").write(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    assert "is not a whole GGUF file" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("split.count", 3, "split.count is 3"),
        ("general.type", "adapter", "general.type is 'adapter'"),
        ("tokenizer.ggml.model", "bert", "tokenizer"),
    ],
)
def test_what_is_no_whole_model(key: str, value: Any, named: str, models: dict[str, Any], tmp_path: Path) -> None:
    gguf = gguf_of(models["llama"], "llama")
    gguf.metadata[key] = value
    assert named in refusal(gguf.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("architecture", ["gemma2", "falcon", "stablelm", "granite", "command-r", "mamba", "newest"])
def test_another_architecture(architecture: str, models: dict[str, Any], tmp_path: Path) -> None:
    gguf = gguf_of(models["llama"], "llama")
    gguf.architecture = architecture
    message = refusal(gguf.write(tmp_path / "model.gguf"))
    assert f"general.architecture is {architecture!r}" in message
    assert "llama" in message


def test_bytes_in_the_other_order(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "byte order" in refusal(tmp_path / "model.gguf")


def test_a_tensor_type_without_a_decoder(models: dict[str, Any], tmp_path: Path) -> None:
    gguf = gguf_of(models["llama"], "llama")
    gguf.tensors["output_norm.weight"] = np.ones(64, dtype=np.int32)
    assert "can't read its weights" in refusal(gguf.write(tmp_path / "model.gguf"))
