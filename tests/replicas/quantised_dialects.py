"""Every dialect that is read, as a small model in it: what its config says, and how a matrix is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.replicas.quantised_checkpoints import (
    FP8,
    GROUP,
    Int4,
    Packed,
    as_awq,
    as_gptq,
    as_packed,
    of_8_bits,
)


@dataclass(frozen=True)
class Case:
    said: dict[str, Any]
    pack: Callable[[str, torch.Tensor], Packed]
    scheme: str
    activations: tuple[torch.dtype, str] | None = None


def _compressed(format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": 1.5, "version": "0.12.2",
        "config_groups": {"group_0": group}, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def _args(bits: int, type_name: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": type_name, "strategy": strategy, "symmetric": True, "dynamic": False,
        "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {},
        **others,
    }  # fmt: skip


def _eight(dtype: torch.dtype, granularity: str, scale_name: str, input_name: str = "") -> Any:
    def pack(name: str, weight: torch.Tensor) -> Packed:
        values, numbers, scales = of_8_bits(weight, dtype, granularity)
        stored = {"weight": values, scale_name: scales}
        if input_name:
            # q, k and v have one input, gate and up too; some calibrations give them scales of their own all the same.
            of_its_own = 0.01 * ("up_proj" in name)
            stored[input_name] = torch.tensor(0.02 + of_its_own)
        return numbers, stored

    return pack


def _four(write: Callable[[Int4], dict[str, torch.Tensor]], *, is_symmetric: bool, seed: int | None = None) -> Any:
    def pack(name: str, weight: torch.Tensor) -> Packed:
        is_other = "v_proj" in name  # an order of its own: it can't be joined
        order = None if seed is None else seed + weight.shape[1] + is_other
        layer = Int4.of(weight, is_symmetric=is_symmetric, order_seed=order)
        return layer.numbers, write(layer)

    return pack


_GPTQ = {
    "bits": 4, "group_size": GROUP, "damp_percent": 0.01, "quant_method": "gptq", "true_sequential": True,
    "model_name_or_path": None, "exllama_config": {"version": 1}, "use_exllama": True,
}  # fmt: skip
_AWQ = {
    "bits": 4, "group_size": GROUP, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
_TOKEN = {"dynamic": True, "strategy": "token", "observer": None}
_INT8, _E4M3 = _args(8, "int", "channel"), _args(8, "float", "channel")

CASES: dict[str, Case] = {
    "fp8 channel token": Case(
        _compressed("float-quantized", _E4M3, _args(8, "float", "token") | _TOKEN),
        _eight(FP8, "channel", "weight_scale"),
        "fp8-channel-token",
        (FP8, "token"),
    ),
    "fp8 static": Case(
        _compressed("float-quantized", _args(8, "float", "tensor"), _args(8, "float", "tensor")),
        _eight(FP8, "tensor", "weight_scale", "input_scale"),
        "fp8-tensor-static",
        (FP8, "static"),
    ),
    "fp8 weights alone": Case(
        _compressed("naive-quantized", _E4M3, None), _eight(FP8, "channel", "weight_scale"), "fp8-channel"
    ),
    "fp8 blocks of compressed-tensors": Case(
        _compressed(
            "float-quantized",
            _args(8, "float", "block", block_structure=[32, 64]),
            _args(8, "float", "group", group_size=64, dynamic=True),
        ),
        _eight(FP8, "block", "weight_scale"),
        "fp8-block32x64-tokengroup",
        (FP8, "group"),
    ),
    "fp8 blocks": Case(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [32, 64],
            "modules_to_not_convert": ["lm_head"],
        },
        _eight(FP8, "block", "weight_scale_inv"),
        "fp8-block32x64-tokengroup",
        (FP8, "group"),
    ),
    "fp8 of AutoFP8": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _eight(FP8, "tensor", "weight_scale", "input_scale"),
        "fp8-tensor-static",
        (FP8, "static"),
    ),
    "int8": Case(
        _compressed("int-quantized", _INT8, _args(8, "int", "token") | _TOKEN),
        _eight(torch.int8, "channel", "weight_scale"),
        "int8-channel-token",
        (torch.int8, "token"),
    ),
    "int4 packed": Case(
        _compressed("pack-quantized", _args(4, "int", "group", group_size=GROUP, actorder="weight"), None),
        _four(as_packed, is_symmetric=True),
        "int4-group32",
    ),
    "int4 packed, with zero points": Case(
        _compressed("pack-quantized", _args(4, "int", "group", group_size=GROUP, symmetric=False), None),
        _four(lambda layer: as_packed(layer, is_symmetric=False), is_symmetric=False),
        "int4-group32",
    ),
    "int4 packed, in an order": Case(
        _compressed("pack-quantized", _args(4, "int", "group", group_size=GROUP, actorder="group"), None),
        _four(lambda layer: as_packed(layer, is_ordered=True), is_symmetric=True, seed=3),
        "int4-group32",
    ),
    "awq": Case(_AWQ, _four(as_awq, is_symmetric=False), "int4-group32"),
    "gptq": Case({**_GPTQ, "desc_act": False, "sym": True}, _four(as_gptq, is_symmetric=True), "int4-group32"),
    "gptq with zero points": Case(
        {**_GPTQ, "desc_act": False, "sym": False}, _four(as_gptq, is_symmetric=False), "int4-group32"
    ),
    "gptq in an order": Case(
        {**_GPTQ, "desc_act": True, "sym": True}, _four(as_gptq, is_symmetric=True, seed=5), "int4-group32"
    ),
    "gptq v2": Case(
        {**_GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        _four(lambda layer: as_gptq(layer, less=0), is_symmetric=False, seed=5),
        "int4-group32",
    ),
}
