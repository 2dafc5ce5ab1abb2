"""Quantised checkpoints of every dialect give the logits that transformers computes on the numbers they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.kv.kv_pool import KvPool
from replicas.layers.packed_weights import PACKED_INPUTS, dequantised, pack_int4, unpack_int4
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.model.checkpoint_mismatch import CheckpointMismatch
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model.stored_weights import StoredLayer, packed_weights
from replicas.model_support import UnsupportedModel
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from replicas.settings import ModelSettings
from tests.engines.random_model import generated_alone, prompts_of, served
from tests.replicas.quantised_checkpoints import GROUP, Int4, as_awq, as_gptq, as_packed, save_quantised, tiny_llama
from tests.replicas.quantised_dialects import CASES

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 17, 3, 88, 41, 60, 9, 33]])


def load(folder: Path, dtype: str = "float32", **changes: Any) -> LoadedModel:
    return load_model(replace(ModelSettings(str(folder), "", dtype, 256, "auto", False), **changes), CPU)


def checked(loaded: LoadedModel) -> float:
    pool = KvPool(loaded.kv_layout(block_size=8), num_blocks=32, device=CPU)
    return self_check(ModelRunner(loaded, pool, num_slots=3, max_model_len=128), loaded)


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_numbers_that_weights_stand_for(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = save_quantised(tmp_path, tiny_llama(), case.said, case.pack, case.activations)
    loaded = load(tmp_path)
    assert loaded.scheme is not None
    assert loaded.scheme.describe() == case.scheme
    assert f" scheme={case.scheme}" in str(loaded.identity)
    # What transformers' model code makes of our layers, before they are joined; of positions from the prompt's end on.
    for prompt in loaded.reference:
        wanted = reference_logits(model, list(prompt.token_ids))[prompt.prompt_len - 1 :]
        scale = float(wanted.abs().max())
        difference = float((prompt.logits - wanted).abs().max())
        # Where inputs are rounded the last bit may decide how; no wrong order or scale is as small as that.
        assert difference < scale * (1e-4 if case.activations is None else 2e-2), name
    assert checked(loaded) < scale * (1e-4 if case.activations is None else 2e-2)
    # Of one layer with the same inputs nothing but the order of sums may differ, with one row and with many.
    layers: Any = loaded.model
    down = layers.model.layers[1].mlp.down_proj
    assert isinstance(down, QuantisedLinear)
    torch.manual_seed(1)
    for num_rows in (1, 3, 70):
        x = torch.randn(num_rows, down.in_features)
        with torch.no_grad():
            wanted = model.model.layers[1].mlp.down_proj(x)
        assert torch.allclose(down(x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        assert torch.allclose(down(x)[:1], down(x[:1]), rtol=1e-5, atol=1e-5)


def test_projections_are_joined_where_they_are_alike(tmp_path: Path) -> None:
    joined = {}
    for name in ("fp8 static", "int8", "awq", "gptq in an order"):
        save_quantised(tmp_path / name, tiny_llama(), CASES[name].said, CASES[name].pack)
        loaded: Any = load(tmp_path / name)
        layer = loaded.model.model.layers[0]
        joined[name] = [hasattr(part, "joined") for part in (layer.self_attn.q_proj, layer.mlp.gate_proj)]
    assert joined == {
        "fp8 static": [True, False],  # gate and up have input scales of their own
        "int8": [True, True],
        "awq": [True, True],
        "gptq in an order": [False, True],  # v has an order of its own
    }


def _layer(tensors: dict[str, torch.Tensor], num_outputs: int, num_inputs: int) -> StoredLayer:
    return StoredLayer("layer", num_outputs, num_inputs, tensors.keys(), lambda name: tensors[name])


_INT4 = Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.GPTQ, GROUP)
PACKERS: dict[str, tuple[Any, Scheme]] = {
    "gptq": (as_gptq, replace(_INT4, is_symmetric=False)),
    "awq": (as_awq, replace(_INT4, dialect=Dialect.AWQ, is_symmetric=False)),
    "packed": (
        lambda layer: as_packed(layer, is_symmetric=False),
        replace(_INT4, dialect=Dialect.COMPRESSED_TENSORS, is_symmetric=False),
    ),
}


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("part", ["values", "zeros", "scales"])
def test_every_number_is_where_it_belongs(name: str, part: str) -> None:
    """One that is unlike the others at a time: order of halves, words, rows and groups."""
    pack, scheme = PACKERS[name]
    outs, ins = 16, 2 * GROUP
    groups = torch.arange(ins).numpy() // GROUP
    shape = (outs, ins if part == "values" else ins // GROUP)
    for row in range(shape[0]):
        for column in range(shape[1]):
            layer = Int4(
                torch.full((outs, ins), 5).numpy(),
                torch.ones(outs, 2).numpy(),
                torch.full((outs, 2), 4).numpy(),
                groups,
            )
            getattr(layer, part)[row, column] = 11
            weights = packed_weights(_layer(pack(layer), outs, ins), scheme)
            assert torch.equal(dequantised(weights, torch.float32), layer.numbers), (row, column)


def test_one_packing_is_not_another() -> None:
    """AWQ's tensors look like others: read in GPTQ's order they would give fluent wrong text."""
    torch.manual_seed(2)
    layer = Int4.of(torch.randn(64, 64), is_symmetric=False)
    with pytest.raises(CheckpointMismatch, match=r"layer.qweight is int32\[64, 8\] instead of int32\[8, 64\]"):
        packed_weights(_layer(as_awq(layer), 64, 64), PACKERS["gptq"][1])
    right = dequantised(packed_weights(_layer(as_awq(layer), 64, 64), PACKERS["awq"][1]), torch.float32)
    assert torch.equal(right, layer.numbers)


def test_packing_of_ours_is_undone() -> None:
    values = torch.randint(0, 16, (8, 3 * PACKED_INPUTS), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(values)), values)


def test_a_text_of_4_bit_weights_is_that_of_transformers(tmp_path: Path) -> None:
    """Over engines, from a prefill to a decode one and in one alone, prompts beside each other and in chunks."""
    case = CASES["awq"]
    model = save_quantised(tmp_path / "awq", tiny_llama(eos_token_id=None), case.said, case.pack)
    model.save_pretrained(tmp_path / "decompressed")
    prompts = prompts_of((5, 40))
    alone = generated_alone(tmp_path / "decompressed", prompts)
    assert served(tmp_path / "awq", prompts) == alone
    assert served(tmp_path / "awq", prompts, is_split=False) == alone


def edited(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


Q = "model.layers.1.self_attn.q_proj"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "a scale is missing": ("int8", lambda t: t.pop(f"{Q}.weight_scale"), rf"no {Q}\.weight_scale"),
    "a layer is not quantised": (
        "int8",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}),
        r"q_proj.weight is float32\[64, 64\] instead of int8",
    ),
    "a layer is left over": ("awq", lambda t: t.update({f"{Q}.weight": torch.ones(64, 64)}), r"no place for .*q_proj"),
    "zero points beside sym: true": (
        "gptq",
        lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"] + 1}),
        "says sym: true",
    ),
    "zero points that v1 can't tell": (
        "gptq with zero points",
        lambda t: t.update({f"{Q}.qzeros": torch.full_like(t[f"{Q}.qzeros"], -1)}),
        "can't tell from others",
    ),
    "an order beside desc_act: false": (
        "gptq",
        lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"].flip(0).contiguous()}),
        "desc_act: false",
    ),
    "groups of other sizes": (
        "gptq in an order",
        lambda t: t.update({f"{Q}.g_idx": torch.zeros_like(t[f"{Q}.g_idx"])}),
        "groups of other sizes",
    ),
    "a bias of a layer without one": (
        "gptq",
        lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}),
        "no place for .*up_proj.bias",
    ),
    "fp8 that is no number": (
        "fp8 channel token",
        lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F),
        "not finite",
    ),
    "int8 of zeros alone": ("int8", lambda t: t[f"{Q}.weight"].zero_(), "nothing but zeros"),
    "the head is quantised": (
        "int8",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
        "lm_head.weight is stored as int8",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_is_not_as_its_config_says_is_refused(name: str, tmp_path: Path) -> None:
    case, edit, message = BROKEN[name]
    save_quantised(tmp_path, tiny_llama(), CASES[case].said, CASES[case].pack)
    edited(tmp_path, edit)
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path)


def test_biases_of_zeros_are_let_be(tmp_path: Path) -> None:
    save_quantised(tmp_path, tiny_llama(), CASES["gptq"].said, CASES["gptq"].pack)
    edited(tmp_path, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}))
    load(tmp_path)


@pytest.mark.parametrize("name", ["int8", "awq", "fp8 blocks"])
def test_a_weight_that_changes_is_another_model(name: str, tmp_path: Path) -> None:
    save_quantised(tmp_path, tiny_llama(), CASES[name].said, CASES[name].pack)
    first = load(tmp_path).identity

    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.startswith(f"{Q}.") and tensors[key].element_size() != 2)
        tensors[key].view(torch.uint8).view(-1)[3] ^= 1

    edited(tmp_path, change)
    second = load(tmp_path).identity
    assert first.differences(second) == ("weights",)
    assert load(tmp_path).identity == second
