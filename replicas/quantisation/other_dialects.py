"""The quantization_config of fp8, AWQ and GPTQ checkpoints. No torch."""

from __future__ import annotations

import re

from replicas.quantisation.compressed_tensors import block_shape
from replicas.quantisation.config_keys import ConfigKeys
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, Targets, WeightKind

# How the numbers were found, who found them, and which kernels another program is to compute with.
_HARMLESS_AWQ = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len")
_HARMLESS_GPTQ = (
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "exllama_config", "is_marlin_format", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse", "pad_token_id", "static_groups",
    "tokenizer", "true_sequential", "uri", "use_cuda_fp16", "use_exllama", "v2",
)  # fmt: skip


def read_fp8(keys: ConfigKeys) -> Scheme:
    """Of transformers' fine-grained fp8 (blocks), and of AutoFP8 and its like (a scale a tensor)."""
    keys.take_one("fmt", ("e4m3",), "e4m3")
    keys.take_one("fmt_float", ("e4m3",), "e4m3")
    alone = (*keys.take_names("modules_to_not_convert"), *keys.take_names("ignored_layers"))
    is_dynamic = keys.take_one("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    has_kv_scales = (kv := keys.take("kv_cache_scheme")) is not None
    if has_kv_scales and kv != "static":
        raise keys.refusal("kv_cache_scheme", kv, "static")
    block = keys.take("weight_block_size")
    targets = Targets(alone=_parts_of_names(keys, "modules_to_not_convert", alone))
    if block is None:
        keys.refuse_rest()
        activations = Activations.TOKEN if is_dynamic else Activations.STATIC
        return Scheme(
            WeightKind.FP8, Granularity.TENSOR, activations, Dialect.FP8, targets=targets, has_kv_scales=has_kv_scales
        )
    if not is_dynamic:
        raise keys.refusal("activation_scheme", "static", "dynamic with weight_block_size")
    rows, columns = block_shape(keys, "weight_block_size", block)
    keys.take_one("scale_fmt", ("float",), "float")
    keys.refuse_rest()
    return Scheme(
        WeightKind.FP8, Granularity.BLOCK, Activations.TOKEN_GROUP, Dialect.FP8, columns, rows, targets=targets,
        has_kv_scales=has_kv_scales,
    )  # fmt: skip


def read_awq(keys: ConfigKeys) -> Scheme:
    """Of AutoAWQ's layout "gemm"."""
    keys.take_one("bits", (4,), keys.take("w_bit"))
    keys.take_one("version", ("gemm", "GEMM"), "gemm")
    keys.take_one("zero_point", (True,), True)
    old_name = keys.take("q_group_size")
    group_size = old_name if old_name is not None else keys.take_group_size()
    alone = keys.take_names("modules_to_not_convert")
    keys.refuse_rest(_HARMLESS_AWQ)
    granularity = Granularity.CHANNEL if group_size == -1 else Granularity.GROUP
    return Scheme(
        WeightKind.INT4, granularity, Activations.NONE, Dialect.AWQ, None if group_size == -1 else group_size,
        is_symmetric=False, targets=Targets(alone=_parts_of_names(keys, "modules_to_not_convert", alone)),
    )  # fmt: skip


def read_gptq(keys: ConfigKeys) -> Scheme:
    """Of AutoGPTQ and GPTQModel, formats v1 and v2."""
    keys.take_one("bits", (4,))
    is_v2 = keys.take_one("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    keys.take_one("format", ("gptq", "gptq_v2"), "gptq_v2" if is_v2 else "gptq")
    keys.take_one("pack_dtype", ("int32",), "int32")
    keys.take_one("lm_head", (False,), False)
    is_ordered, is_symmetric = (
        keys.take_one("desc_act", (True, False), False),
        keys.take_one("sym", (True, False), True),
    )
    group_size = keys.take_group_size()
    keys.refuse_rest(_HARMLESS_GPTQ)
    granularity = Granularity.CHANNEL if group_size == -1 else Granularity.GROUP
    return Scheme(
        WeightKind.INT4, granularity, Activations.NONE, Dialect.GPTQ_V2 if is_v2 else Dialect.GPTQ,
        None if group_size == -1 else group_size, is_symmetric=is_symmetric,
        is_ordered=is_ordered and group_size != -1,
    )  # fmt: skip


def _parts_of_names(keys: ConfigKeys, key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of names that stand for every module whose own has them as a part, between points or ends."""
    for name in names:
        if not re.fullmatch(r"[\w.\-]+", name):
            raise keys.refusal(key, name, "names of modules")
    return tuple(rf"(?:.*\.)?{re.escape(name)}(?:\..*)?" for name in names)
