"""Quantised models as folders, and what transformers alone generates with the numbers that their weights stand for.

Weights are decompressed by the library compressed-tensors where it knows how, else by what wrote them in the tests;
inputs of products, keys and values are rounded by the tests' own code. All in float32, a prompt at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM

from tests.engines.rounded_kv import Scales, generate_rounded
from tests.golden.golden_set import Golden
from tests.golden.make_golden import generate
from tests.replicas.quantised_checkpoints import FP8, rounding_hook, save_quantised, tiny_llama
from tests.replicas.quantised_dialects import CASES
from tests.replicas.test_compressed_tensors import SCHEMES, written_by_the_library

NUM_TOKENS = 16
# Where the last bit decides how an input is rounded it is a step off, and logits by as much as this.
_MIN_MARGIN = 0.03
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_SCALES = ((0.013, 0.7), (1.5, 0.0021))  # one that cuts numbers off, too


@dataclass
class QuantisedReference:
    """quantise: as of ModelSettings. scales: those that the folder has of KV."""

    folder: Path
    model: Any
    quantise: str = "none"
    scales: Scales = ()
    _made: dict[tuple[int, str, int], Golden] = field(default_factory=dict)

    def of(self, num_prompt_tokens: int, kv_dtype: str, number: int = 0) -> Golden:
        """The number-th prompt of a length, and what comes of it: no near ties, nor the same token again and again."""
        key = (num_prompt_tokens, kv_dtype, number)
        if key not in self._made:
            self._made[key] = next(g for seed in range(1000) if (g := self._candidate(key, seed)) is not None)
        return self._made[key]

    def _candidate(self, key: tuple[int, str, int], seed: int) -> Golden | None:
        rng = random.Random(f"{key} {seed}")
        prompt_ids = [rng.randrange(3, self.model.config.vocab_size) for _ in range(key[0])]
        if key[1] == "fp8":
            output_ids, margins = generate_rounded(self.model, prompt_ids, NUM_TOKENS, self.scales)
        else:
            output_ids, margins = generate(self.model, prompt_ids, NUM_TOKENS)
        if min(margins) < _MIN_MARGIN or len(set(output_ids)) < NUM_TOKENS // 3:
            return None
        return Golden(f"{self.folder.name}/{key}", "ids", prompt_ids, prompt_ids, output_ids, margins)


def reference(name: str, folder: Path) -> QuantisedReference:
    """Of a name in REFERENCES: the folder is written."""
    made = REFERENCES[name](folder)
    made.model.generation_config = GenerationConfig(pad_token_id=0)  # stops nowhere
    return made


def _plain() -> LlamaForCausalLM:
    """Rows of 128, for groups of int4."""
    return tiny_llama(intermediate_size=128, eos_token_id=None)


def _of_dialect(case: str) -> Callable[[Path], QuantisedReference]:
    def write(folder: Path) -> QuantisedReference:
        of = CASES[case]
        return QuantisedReference(folder, save_quantised(folder, _plain(), of.said, of.pack, of.activations))

    return write


def _of_library(scheme: str, has_kv_scales: bool = False) -> Callable[[Path], QuantisedReference]:
    def write(folder: Path) -> QuantisedReference:
        said, pack, activations = written_by_the_library(scheme)
        if not has_kv_scales:
            return QuantisedReference(folder, save_quantised(folder, _plain(), said, pack, activations))
        model = save_quantised(folder, _plain(), {**said, "kv_cache_scheme": KV_SCHEME}, pack, activations)
        tensors = load_file(folder / "model.safetensors")
        for layer, pair in enumerate(KV_SCALES):
            for kind, scale in zip("kv", pair, strict=True):
                tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([scale])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return QuantisedReference(folder, model, scales=KV_SCALES)

    return write


def _at_load(kind: str) -> Callable[[Path], QuantisedReference]:
    def write(folder: Path) -> QuantisedReference:
        model = _plain()
        model.save_pretrained(folder)
        by = _hadamard()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.data = _rounded_weights(module.weight.detach(), kind, by)
                if kind == "fp8":
                    module.register_forward_pre_hook(rounding_hook(FP8, "token"))
                elif kind == "int8":
                    module.register_forward_pre_hook(_rotated_rounding(by))
        return QuantisedReference(folder, model, kind)

    return write


def _rounded_weights(weight: torch.Tensor, kind: str, by: torch.Tensor) -> torch.Tensor:
    """As docs/models.md says it, by the library's own rounding."""
    if kind == "int4":
        args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False)
        groups = weight.unflatten(1, (-1, 64))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
        numbers: torch.Tensor = fake_quantize(weight, scale, zero, args)
        return numbers
    if kind == "int8":
        weight = _rotated(weight, by)
    args = QuantizationArgs(num_bits=8, type="float" if kind == "fp8" else "int", strategy="channel")
    scale = weight.abs().amax(1, keepdim=True) / (448.0 if kind == "fp8" else 127.0)
    numbers = fake_quantize(weight, scale, torch.zeros_like(scale), args)
    return _rotated(numbers, by) if kind == "int8" else numbers


def _hadamard() -> torch.Tensor:
    """Of 64, over its root, so that it is its own inverse: less than 0 where i and j have an odd number of bits in
    common."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]) / 8


def _rotated(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (rows.unflatten(-1, (-1, 64)) @ by).flatten(-2)


def _rotated_rounding(by: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
    round_token = rounding_hook(torch.int8, "token")

    def hook(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (rounded,) = round_token(module, (_rotated(inputs[0], by),))
        return (_rotated(rounded, by),)

    return hook


REFERENCES: dict[str, Callable[[Path], QuantisedReference]] = {
    **{f"{kind} at load": _at_load(kind) for kind in ("int8", "fp8", "int4")},
    **{f"compressed-tensors {name}": _of_library(name) for name in SCHEMES},
    "compressed-tensors fp8 with scales of KV": _of_library("fp8", has_kv_scales=True),
    **{name: _of_dialect(name) for name in CASES},
}
