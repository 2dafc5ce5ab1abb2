"""Tiny quantised checkpoints in all dialects, written from their published descriptions, a number at a time.

Nothing here is shared with what reads them. Beside each checkpoint: the numbers that its weights stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
GROUP = 32
BLOCK = (32, 64)  # inputs of 96 are a block and a half
# AutoAWQ, `pack_intweight`: column 8 i + AWQ_ORDER[j] is in bits 4 j to 4 j + 3 of word i.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Int4:
    """Weight (values - zeros) * scales: values [N, K], the others [N, groups]; groups [K]: which one an input is of."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @staticmethod
    def of(weight: torch.Tensor, *, is_symmetric: bool, order_seed: int | None = None) -> Int4:
        numbers = weight.double().numpy()
        groups = np.arange(numbers.shape[1]) // GROUP
        if order_seed is not None:
            groups = np.random.default_rng(order_seed).permutation(groups)
        num_groups = numbers.shape[1] // GROUP
        scales, zeros = np.zeros((len(numbers), num_groups)), np.full((len(numbers), num_groups), 8)
        for group in range(num_groups):
            part = numbers[:, groups == group]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            step = np.maximum(-low, high) / 7 if is_symmetric else (high - low) / 15
            # A zero point of 0 can't be said in GPTQ v1.
            scales[:, group] = np.float16(step)
            if not is_symmetric:
                zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 1, 15)
        values = np.clip(np.rint(numbers / scales[:, groups]) + zeros[:, groups], 0, 15)
        return Int4(values.astype(int), scales, zeros.astype(int), groups)

    @property
    def numbers(self) -> torch.Tensor:
        numbers = (self.values - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        return torch.from_numpy(numbers).float()

    def half(self, transposed: bool) -> torch.Tensor:
        scales = torch.from_numpy(self.scales).half()
        return scales.t().contiguous() if transposed else scales


def words(shape: tuple[int, int], rows: Any, columns: Any, places: Any, numbers: np.ndarray) -> torch.Tensor:
    """int32 of this shape. Of each number: its word's row and column, and which four bits of the word it has."""
    found = np.zeros(shape, np.uint32)
    at = np.broadcast_arrays(rows, columns)
    np.bitwise_or.at(found, (at[0], at[1]), numbers.astype(np.uint32) << (4 * places).astype(np.uint32))
    return torch.from_numpy(found.view(np.int32).copy())


def _outs_and_ins(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each number, to be broadcast."""
    return np.arange(matrix.shape[0])[:, None], np.arange(matrix.shape[1])[None, :]


def as_gptq(layer: Int4, *, less: int = 1) -> Tensors:
    (outs, ins), num_groups = layer.values.shape, layer.scales.shape[1]
    n, k = _outs_and_ins(layer.values)
    _, g = _outs_and_ins(layer.zeros)
    return {
        "qweight": words((ins // 8, outs), k // 8, n, k % 8, layer.values),
        "qzeros": words((num_groups, outs // 8), g, n // 8, n % 8, layer.zeros - less),
        "scales": layer.half(transposed=True),
        "g_idx": torch.from_numpy(layer.groups).int(),
    }


def as_awq(layer: Int4) -> Tensors:
    (outs, ins), num_groups = layer.values.shape, layer.scales.shape[1]
    n, k = _outs_and_ins(layer.values)
    _, g = _outs_and_ins(layer.zeros)
    place = np.array([AWQ_ORDER.index(column) for column in range(8)])[n % 8]
    return {
        "qweight": words((ins, outs // 8), k, n // 8, place, layer.values),
        "qzeros": words((num_groups, outs // 8), g, n // 8, place, layer.zeros),
        "scales": layer.half(transposed=True),
    }


def as_packed(layer: Int4, *, is_symmetric: bool = True, is_ordered: bool = False) -> Tensors:
    """Of compressed-tensors, pack-quantized."""
    (outs, ins), num_groups = layer.values.shape, layer.scales.shape[1]
    n, k = _outs_and_ins(layer.values)
    _, g = _outs_and_ins(layer.zeros)
    tensors = {
        "weight_packed": words((outs, ins // 8), n, k // 8, k % 8, layer.values),
        "weight_scale": layer.half(transposed=False),
        "weight_shape": torch.tensor([outs, ins]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words((outs // 8, num_groups), n // 8, g, n % 8, layer.zeros)
    if is_ordered:
        tensors["weight_g_idx"] = torch.from_numpy(layer.groups).int()
    return tensors


def rounded(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """scale: of the weight's shape."""
    numbers = weight / scale
    return numbers.to(dtype) if dtype is FP8 else numbers.round().clamp(-127, 127).to(dtype)


def of_8_bits(weight: torch.Tensor, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Rounded values, the numbers that they stand for, and scales as files have them."""
    largest = 448.0 if dtype is FP8 else 127.0
    if granularity == "tensor":
        scales = weight.abs().max().view(()) / largest
        full = scales.expand_as(weight)
    elif granularity == "channel":
        scales = weight.abs().amax(1, keepdim=True) / largest
        full = scales.expand_as(weight)
    else:
        rows, columns = BLOCK
        full = torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = weight[place].abs().max() / largest
                full[place] = scales[i, j]
    values = rounded(weight, full, dtype)
    return values, values.float() * full, scales


def rounding_hook(dtype: torch.dtype, how: str) -> Callable[[nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
    """Of a linear layer's inputs: "token", "static" (by `input_scale` of the layer) or "group" (of 64)."""
    largest = 448.0 if dtype is FP8 else 127.0

    def by(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        numbers = (x / scale).clamp(-largest, largest)
        return (numbers.to(FP8).float() if dtype is FP8 else numbers.round()) * scale

    def hook(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        if how == "static":
            return (by(x, module.input_scale),)  # type: ignore[arg-type]
        parts = x.split(BLOCK[1], dim=-1) if how == "group" else [x]
        return (
            torch.cat(
                [by(part, part.abs().amax(-1, keepdim=True).clamp(min=1e-9) / largest) for part in parts], dim=-1
            ),
        )

    return hook


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": True, **changes,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = 0.1 * torch.randn_like(parameter)
    return model


Packed = tuple[torch.Tensor, Tensors]  # the numbers of a weight, and what a file has of it


def save_quantised(
    folder: Path,
    model: LlamaForCausalLM,
    said: dict[str, Any],
    pack: Callable[[str, torch.Tensor], Packed],
    activations: tuple[torch.dtype, str] | None = None,
    *,
    alone: tuple[str, ...] = ("lm_head",),
) -> LlamaForCausalLM:
    """A checkpoint of the model's weights packed; the model comes back with the numbers that they stand for."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name in alone:
            continue
        numbers, stored = pack(name, module.weight.detach())
        module.weight.data = numbers
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in stored.items()}
        if "input_scale" in stored:
            module.register_buffer("input_scale", stored["input_scale"].view(1), persistent=False)
        if activations is not None:
            module.register_forward_pre_hook(rounding_hook(*activations))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return model
