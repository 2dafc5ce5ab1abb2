"""What a checkpoint's quantization_config says is understood wholly, or refused by the key that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig

from replicas.model_support import UnsupportedModel
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from replicas.quantisation.scheme_reading import chosen_scheme, read_scheme
from tests.replicas.quantised_dialects import CASES

GPTQ, AWQ, FP8, BLOCKS = (CASES[name].said for name in ("gptq", "awq", "fp8 of AutoFP8", "fp8 blocks"))
TOKEN, PACKED, INT8 = (CASES[name].said for name in ("fp8 channel token", "int4 packed", "int8"))


# As llm-compressor writes it for RedHatAI/*-FP8-KV.
KV_SCHEME = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor", "symmetric": True, "type": "float",
}  # fmt: skip


def config_of(said: dict[str, Any] | None) -> LlamaConfig:
    return LlamaConfig(quantization_config=said) if said else LlamaConfig()


@pytest.mark.parametrize("name", CASES)
def test_what_is_understood(name: str) -> None:
    scheme = read_scheme(config_of(CASES[name].said))
    assert scheme is not None
    assert scheme.describe() == CASES[name].scheme
    assert scheme.targets.has("model.layers.0.mlp.up_proj")
    assert not scheme.targets.has("lm_head", is_head=True)


# Of the Hub, as they are there.
PUBLISHED: dict[str, tuple[dict[str, Any], Scheme]] = {
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (
        {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
            "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
            "group_size": 128, "max_input_length": None, "model_seqlen": None,
            "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
            "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
            "use_exllama": True,
        },
        Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.GPTQ, 128),
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        {
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True,
        },
        Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.AWQ, 128, is_symmetric=False),
    ),
    "Qwen/Qwen3-8B-FP8": (
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        Scheme(WeightKind.FP8, Granularity.BLOCK, Activations.TOKEN_GROUP, Dialect.FP8, 128, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_the_hub(name: str) -> None:
    said, scheme = PUBLISHED[name]
    assert read_scheme(config_of(said)) == scheme


Edit = Callable[[dict[str, Any]], Any]


def _weights(**changes: Any) -> Edit:
    return lambda said: said["config_groups"]["group_0"]["weights"].update(changes)


def _inputs(**changes: Any) -> Edit:
    return lambda said: said["config_groups"]["group_0"]["input_activations"].update(changes)


def _said(**changes: Any) -> Edit:
    return lambda said: said.update(changes)


def _kv(**changes: Any) -> Edit:
    return _said(kv_cache_scheme={**KV_SCHEME, **changes})


def _two_groups(said: dict[str, Any]) -> None:
    said["config_groups"]["group_1"] = said["config_groups"]["group_0"]


REFUSED: dict[str, tuple[dict[str, Any], Edit, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _said(), "quant_method: 'bitsandbytes'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _said(), "quant_method: 'modelopt'"),
    "no method": ({"bits": 4}, _said(), "quant_method: null"),
    "gptq of 8 bits": (GPTQ, _said(bits=8), "bits: 8 is not supported, expected 4"),
    "gptq of 3 bits": (GPTQ, _said(bits=3), "bits: 3"),
    "gptq for marlin": (GPTQ, _said(checkpoint_format="marlin"), "checkpoint_format: 'marlin'"),
    "gptq, layers in unlike ways": (GPTQ, _said(dynamic={"-:lm_head": {}}), "dynamic"),
    "gptq of the head": (GPTQ, _said(lm_head=True), "lm_head: true is not supported, expected false"),
    "gptq of some layers": (GPTQ, _said(modules_in_block_to_quantize=[["mlp"]]), "modules_in_block_to_quantize"),
    "gptq, groups of 16": (GPTQ, _said(group_size=16), "group_size: 16"),
    "gptq, no size": (GPTQ, lambda said: said.pop("group_size"), "group_size: null"),
    "gptq, true for a number": (GPTQ, _said(bits=True), "bits: true"),
    "awq gemv": (AWQ, _said(version="gemv"), "version: 'gemv' is not supported, expected 'gemm'"),
    "awq without zero points": (AWQ, _said(zero_point=False), "zero_point: false"),
    "awq, a key nobody knows": (AWQ, _said(rotation="hadamard"), "rotation: 'hadamard'"),
    "fp8, e5m2": (FP8, _said(fmt="e5m2"), "fmt: 'e5m2'"),
    "fp8, scales for KV as it comes": (FP8, _said(kv_cache_scheme="dynamic"), "kv_cache_scheme: 'dynamic' is not"),
    "fp8, patterns of names": (FP8, _said(ignored_layers=["re:.*mlp"]), "modules_to_not_convert: 're:"),
    "fp8, static blocks": (BLOCKS, _said(activation_scheme="static"), "activation_scheme: 'static'"),
    "fp8, blocks of 100": (BLOCKS, _said(weight_block_size=[100, 100]), "weight_block_size"),
    "fp8, powers of two for scales": (BLOCKS, _said(scale_fmt="ue8m0"), "scale_fmt: 'ue8m0'"),
    "mixed precision": (TOKEN, _said(format="mixed-precision"), "format: 'mixed-precision'"),
    "nvfp4": (TOKEN, _said(format="nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized'"),
    "sparse": (TOKEN, _said(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "rotated": (TOKEN, _said(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "int8 KV": (TOKEN, _said(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme.type: 'int' is not supported"),
    "4-bit KV": (TOKEN, _kv(num_bits=4), "kv_cache_scheme.num_bits: 4 is not supported, expected 8"),
    "KV by heads": (TOKEN, _kv(strategy="attn_head"), "kv_cache_scheme.strategy: 'attn_head'"),
    "KV by tokens": (TOKEN, _kv(dynamic=True), "kv_cache_scheme.dynamic: true"),
    "KV with zero points": (TOKEN, _kv(symmetric=False), "kv_cache_scheme.symmetric: false"),
    "KV in groups": (TOKEN, _kv(group_size=16), "kv_cache_scheme.group_size: 16"),
    "KV, a key nobody knows": (TOKEN, _kv(rotation="hadamard"), "kv_cache_scheme.rotation"),
    "KV, no object": (TOKEN, _said(kv_cache_scheme="static"), "kv_cache_scheme: 'static' is no JSON object"),
    "two groups": (TOKEN, _two_groups, "config_groups"),
    "not compressed yet": (TOKEN, _said(quantization_status="calibration"), "quantization_status"),
    "one scale for a batch": (TOKEN, _inputs(strategy="tensor"), "input_activations.strategy: 'tensor'"),
    "rounded outputs": (
        TOKEN,
        lambda said: said["config_groups"]["group_0"].update(output_activations={"num_bits": 8}),
        "output_activations",
    ),
    "inputs with zero points": (INT8, _inputs(symmetric=False), "input_activations.symmetric: false"),
    "int8 with zero points": (INT8, _weights(symmetric=False), "weights.symmetric: false"),
    "inputs of another kind": (PACKED, lambda said: said["config_groups"]["group_0"].update(
        input_activations={"num_bits": 8, "type": "int"}), "input_activations.num_bits"),
    "8 bits packed": (PACKED, _weights(num_bits=8), "weights.num_bits: '8 of type int'"),
    "groups of 16": (PACKED, _weights(group_size=16), "weights.group_size: 16"),
    "another order": (PACKED, _weights(actorder="random"), "weights.actorder: 'random'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_its_key(name: str) -> None:
    said, edit, key = REFUSED[name]
    said = copy.deepcopy(said)
    edit(said)
    with pytest.raises(UnsupportedModel) as raised:
        read_scheme(config_of(said))
    assert key in str(raised.value)
    assert "quantization_config" in str(raised.value)
    assert "unquantised checkpoint with model.quantise" in str(raised.value), "the way out"


@pytest.mark.parametrize(
    ("said", "has_kv_scales"),
    [
        ({**TOKEN, "kv_cache_scheme": KV_SCHEME}, True),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),  # the rest is usual
        (TOKEN, False),
        ({**FP8, "kv_cache_scheme": "static"}, True),
        ({**BLOCKS, "kv_cache_scheme": "static"}, True),
        (FP8, False),
    ],
)
def test_scales_of_kv_are_told(said: dict[str, Any], has_kv_scales: bool) -> None:
    """And say nothing of the weights: engines of like weights have their KV's scales in their layouts."""
    scheme = read_scheme(config_of(said))
    assert scheme is not None
    assert scheme.has_kv_scales is has_kv_scales
    plain = read_scheme(config_of({**said, "kv_cache_scheme": None}))
    assert plain is not None
    assert scheme.describe() == plain.describe()


@pytest.mark.parametrize(
    ("said", "name", "is_quantised"),
    [
        ({**BLOCKS, "modules_to_not_convert": ["mlp.gate"]}, "model.layers.0.mlp.gate_proj", True),
        ({**BLOCKS, "modules_to_not_convert": ["mlp.gate"]}, "model.layers.0.mlp.gate", False),
        ({**BLOCKS, "modules_to_not_convert": ["model.layers.1"]}, "model.layers.1.mlp.up_proj", False),
        ({**BLOCKS, "modules_to_not_convert": ["model.layers.1"]}, "model.layers.11.mlp.up_proj", True),
        ({**TOKEN, "ignore": ["re:.*mlp"]}, "model.layers.1.mlp.up_proj", False),
        ({**TOKEN, "ignore": ["model.layers.1.mlp.up_proj"]}, "model.layers.1.mlp.up_proj", False),
        ({**TOKEN, "ignore": ["model.layers.1"]}, "model.layers.1.mlp.up_proj", True),
        ({**TOKEN, "ignore": []}, "lm_head", True),
    ],
)
def test_which_layers_are_left_alone(said: dict[str, Any], name: str, is_quantised: bool) -> None:
    scheme = read_scheme(config_of(said))
    assert scheme is not None
    assert scheme.targets.has(name, is_head=name == "lm_head") is is_quantised


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    assert chosen_scheme(config_of(None), "none") is None
    made = chosen_scheme(config_of(None), "int8")
    assert made is not None
    assert made.describe() == "int8-channel-token-rotated64"
    with pytest.raises(UnsupportedModel, match=r"int4-group32.*leave model\.quantise out"):
        chosen_scheme(config_of(AWQ), "int8")
