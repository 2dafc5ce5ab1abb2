"""Quantised layers of Llama-3.1-8B's widths on a card: each product by itself, many behind each other, a small model.

What fails says where: in rounding the inputs, in the product of what is rounded, by the number of rows, or only where
other products run right before and behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="a CPU torch comes without triton")
from replicas.cuda.int4_card_linear import Int4CardLinear
from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.cuda.runner import CudaRunner
from replicas.kernels.round_rows import round_rows
from replicas.kv.kv_pool import KvPool
from replicas.layers import rounding
from replicas.layers.packed_weights import FP8
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.model.layer_check import check_layers
from replicas.model.model_loader import load_model
from replicas.model.self_check import self_check
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from replicas.settings import ModelSettings

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # outputs, inputs
NUM_ROWS = (1, 4, 16, 35, 64, 100, 2048)
KINDS = {
    "fp8": Scheme(WeightKind.FP8, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE),
    "int8": Scheme(WeightKind.INT8, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE),
    "int4": Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.MADE_HERE, 128),
}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def layers_of(kind: str, device: torch.device) -> Iterator[QuantisedCardLinear | Int4CardLinear]:
    """Of weights and sizes as random models have them."""
    for num_out, num_in in SHAPES:
        torch.manual_seed(num_out + num_in)
        weight = (torch.randn(num_out, num_in, device=device) * 0.02).bfloat16()
        if kind == "int4":
            yield Int4CardLinear(rounding.round_weights_int4(weight, 128), None, KINDS[kind])
        else:
            packed = rounding.round_weights(weight, FP8 if kind == "fp8" else torch.int8)
            yield QuantisedCardLinear(packed, None, KINDS[kind])


def rows_of(num_rows: int, num_in: int, device: torch.device) -> torch.Tensor:
    """As behind a norm; one row of zeros, where there are others, and one with a number far above the rest."""
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, device=device)
    if num_rows > 2:
        x[1], x[2, 77] = 0.0, 60.0
    return x.bfloat16()


def off(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_product_of_every_number_of_rows(kind: str, device: torch.device) -> None:
    found, wrong = [], False
    for layer in layers_of(kind, device):
        for num_rows in NUM_ROWS:
            x = rows_of(num_rows, layer.in_features, device)
            wanted = QuantisedLinear.forward(layer, x)
            out = layer(x)
            error, is_counted = off(out, wanted), bool(layer.arrived.any())
            worst = int((out.float() - wanted.float()).abs().amax(0).argmax())
            text = f"{layer.out_features} x {layer.in_features}, {num_rows} rows: {error:.2g}, most in output {worst}"
            if kind != "int4":
                values, scales = round_rows(x, layer.values.dtype, layer.in_features)
                others, other_scales = rounding.round_rows(x, layer.values.dtype, layer.in_features)
                unlike = float((values.float() != others.float()).float().mean())
                of_scales = float((scales / other_scales - 1).abs().max())
                text += f"; inputs rounded otherwise {unlike:.2g}, scales off by {of_scales:.2g}"
                wrong |= not unlike < 1e-4 or not of_scales < 1e-6
            wrong |= not error < 4e-3 or not bool(out.isfinite().all()) or is_counted
            found.append(text + (", counts left behind" if is_counted else ""))
    print("\n".join(found))
    assert not wrong, "\n".join(["", *found])


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_products_right_behind_each_other_are_those_of_each_alone(kind: str, device: torch.device) -> None:
    """Of other shapes, whose parts lie in memory that the one before has just let go; without waiting, and as graph."""
    layers = list(layers_of(kind, device))
    for num_rows in (1, 16, 35, 64):
        cases = [(layer, rows_of(num_rows, layer.in_features, device)) for layer in layers]
        alone = []
        for layer, x in cases:
            torch.cuda.synchronize()
            alone.append(layer(x))
            torch.cuda.synchronize()
        together = [[layer(x).clone() for layer, x in cases] for _ in range(10)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [layer(x) for layer, x in cases]
        for _ in range(10):
            graph.replay()
            together.append([out.clone() for out in captured])
        unlike = {
            f"run {run}, {layer.out_features} x {layer.in_features}": off(out, wanted)
            for run, outs in enumerate(together)
            for out, wanted, layer in zip(outs, alone, layers, strict=True)
            if not torch.equal(out, wanted)
        }
        assert not unlike, f"{num_rows} rows; runs from 10 on are a graph's: {unlike}"


@pytest.mark.slow  # on a card some 10 s
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_these_widths_is_as_transformers_has_it(
    kind: str, kv_dtype: str, device: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = ModelSettings(str(tmp_path), str(tmp_path), "bfloat16", 256, "dummy", False, kind)
    loaded = load_model(settings, device, kv_dtype)
    runner = CudaRunner(loaded, KvPool(loaded.kv_layout(16, kv_dtype), 128, device), 4, 256)
    assert 0.0 < check_layers(loaded.model, loaded.dtype) < 4e-3
    scale = max(float(prompt.logits.abs().max()) for prompt in loaded.reference)
    moved = [prompt.moved for prompt in loaded.reference if prompt.moved is not None]
    by_rounding = max((float(one.max()) for one in moved), default=0.0)
    difference = self_check(runner, loaded)
    print(f"{difference:.3g} of {scale:.3g}; rounding inputs moves logits by {by_rounding:.3g}")
    if kv_dtype == "auto":
        assert difference < max(0.03 * scale, by_rounding)
