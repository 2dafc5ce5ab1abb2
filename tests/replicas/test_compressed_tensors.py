"""Checkpoints that the library compressed-tensors writes: our logits are those of the weights that it unpacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from tests.replicas.quantised_checkpoints import FP8, Packed, save_quantised, tiny_llama
from tests.replicas.test_quantised_checkpoints import checked, load, reference_logits

_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, Any]] = {
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", **_TOKEN},
        (FP8, "token"),
    ),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", **_TOKEN},
        (torch.int8, "token"),
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None, None),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
        None,
    ),
    "int4 by channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, None, None),
}


def written_by_the_library(
    name: str,
) -> tuple[dict[str, Any], Callable[[str, torch.Tensor], Packed], tuple[torch.dtype, str] | None]:
    """A quantization_config, how it packs a matrix and what that stands for, and how inputs are rounded."""
    format, weights, inputs, activations = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(layer: str, weight: torch.Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, weights.get("group_size", weight.shape[1])))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
        stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return compressor.decompress(dict(stored), scheme)["weight"].float(), stored

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed", ignore=["lm_head"]
    )
    return config.model_dump(mode="json"), pack, activations


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_its_own_weights(name: str, tmp_path: Path) -> None:
    said, pack, activations = written_by_the_library(name)
    model = save_quantised(tmp_path, tiny_llama(), said, pack, activations)
    loaded = load(tmp_path)
    tolerance = 1e-4 if activations is None else 2e-2
    for prompt in loaded.reference:
        wanted = reference_logits(model, list(prompt.token_ids))[prompt.prompt_len - 1 :]
        assert float((prompt.logits - wanted).abs().max()) < tolerance * float(wanted.abs().max())
    checked(loaded)
