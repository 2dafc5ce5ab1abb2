"""`model.quantise`: weights of a checkpoint that is not quantised are rounded when they are loaded."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from replicas.kv.kv_pool import KvPool
from replicas.layers.packed_weights import FP8, PackedWeights, dequantised
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import round_rows, round_weights, round_weights_int4
from replicas.model import quantised_model
from replicas.model.checkpoint_mismatch import CheckpointMismatch
from replicas.model.model_loader import load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_identity import UnlikeModels, refuse_unlike
from replicas.model_support import UnsupportedModel
from replicas.quantisation.scheme import Scheme
from replicas.settings import ModelSettings
from tests.engines.random_model import save_random_model, tiny_config
from tests.replicas.quantised_checkpoints import tiny_llama
from tests.replicas.quantised_dialects import CASES
from tests.replicas.test_quantised_checkpoints import CPU, checked, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(intermediate_size=128, tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


def _names(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("fp8", "fp8-channel-token"), ("int8", "int8-channel-token"), ("int4", "int4-group64")],
)
def test_each_kind(kind: str, scheme: str, folder: Path) -> None:
    loaded = load(folder, quantise=kind)
    assert loaded.identity.scheme == scheme
    checked(loaded)
    layers = {f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.o_proj", "mlp.down_proj")}
    joined = {
        f"model.layers.{i}.{part}.joined.linear" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.gate_proj")
    }
    assert _names(loaded.model) == layers | joined
    model: Any = loaded.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weight = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    down = model.model.layers[0].mlp.down_proj
    errors = (dequantised(down.weights, torch.float32) - weight).abs()
    if kind == "int4":
        assert bool((errors <= down.scales.repeat_interleave(64, 1) * 0.51).all())
    elif kind == "int8":
        assert bool((errors <= down.scales * 0.501).all())
    else:
        # Three bits behind the point, and steps of 2^-9 near zero.
        assert bool((errors <= (weight.abs() / 16).clamp(min=2**-10 * 1.01) * 1.01 + down.scales * 2**-10).all())


def test_unlike_schemes_exchange_nothing(folder: Path) -> None:
    texts = {str(load(folder, quantise=kind).identity) for kind in ("none", "int8", "fp8")}
    assert len(texts) == 3
    with pytest.raises(UnlikeModels, match="weights, scheme"):
        refuse_unlike(*sorted(texts)[:2])


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_a_row_is_rounded_by_itself(dtype: torch.dtype) -> None:
    """Beside others or alone, the largest number is kept, and zeros are."""
    x = torch.tensor([[1.0, -3.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0], [1e4, 1.0, -1.0, 3.0]])
    values, scales = round_rows(x, dtype, 4)
    for row in range(3):
        alone, scale = round_rows(x[row : row + 1], dtype, 4)
        assert torch.equal(alone.float(), values[row : row + 1].float())
        assert torch.equal(scale, scales[row : row + 1])
    numbers = values.float() * scales
    assert torch.allclose(numbers.abs().amax(1), x.abs().amax(1))
    assert not numbers[1].any()


def test_rounding_what_is_exact_changes_nothing() -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (8, 64)).float()
    weight[:, 0] = 127
    assert torch.equal(dequantised(round_weights(weight, torch.int8), torch.float32), weight)
    fours = torch.randint(-7, 9, (8, 128)).float()
    fours[:, 0], fours[:, 1], fours[:, 64], fours[:, 65] = -7, 8, -7, 8
    assert torch.equal(dequantised(round_weights_int4(fours, 64), torch.float32), fours)


def test_rows_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"rows of multiples of 64 .*down_proj.*set int8 or fp8"):
        load(tmp_path, quantise="int4")


def test_experts_are_refused(tmp_path: Path) -> None:
    save_random_model(tiny_config("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=32, head_dim=16), tmp_path)
    with pytest.raises(UnsupportedModel, match="has experts"):
        load(tmp_path, quantise="int8")


def test_files_of_pytorch_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointMismatch, match="safetensors"):
        load(folder, quantise="int8")


def test_a_head_unlike_tied_embeddings_is_refused(tmp_path: Path) -> None:
    tiny_llama(intermediate_size=128).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointMismatch, match="tie_word_embeddings: true"):
        load(tmp_path, quantise="int8")


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 static", "gptq"])
def test_random_weights_of_a_quantised_config(name: str, tmp_path: Path) -> None:
    """The same in every replica, and of the scheme that the config says."""
    model = LlamaForCausalLM(tiny_llama().config)
    said = {**model.config.to_dict(), "quantization_config": CASES[name].said, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(said, default=str))
    settings = replace(ModelSettings(str(tmp_path), "", "float32", 256, "dummy", False))
    first, second = load_model(settings, CPU), load_model(settings, CPU)
    assert first.identity == second.identity
    assert first.identity.scheme == CASES[name].scheme
    checked(first)


def test_random_layers_are_there_in_full_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 70 billion weights fits a card in fp8, and not in the type that they are made in."""
    made: list[weakref.ref[torch.nn.Parameter]] = []
    alive: list[int] = []
    freeze, make_up = quantised_model._frozen, quantised_model._made_up

    def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
        parameter = freeze(tensor)
        if tensor.dim() == 2:
            made.append(weakref.ref(parameter))
        return parameter

    def made_up(weight: torch.Tensor, scheme: Scheme) -> PackedWeights:
        alive.append(sum(of() is not None for of in made))
        return make_up(weight, scheme)

    monkeypatch.setattr(quantised_model, "_frozen", frozen)
    monkeypatch.setattr(quantised_model, "_made_up", made_up)
    load(folder, load_format="dummy", quantise="fp8")
    assert len(alive) == 14
    assert max(alive) == 2, "the embeddings, and the layer at hand"


@pytest.mark.parametrize(("kind", "is_within"), [("fp8", True), ("int4", False), ("none", False)])
def test_what_is_rounded_at_each_layer_may_be_further_off(folder: Path, kind: str, is_within: bool) -> None:
    """Inputs that fall to another number of fp8, layer by layer, move logits by more than bfloat16 alone does."""
    loaded = load(folder, dtype="bfloat16", quantise=kind)
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(8), num_blocks=32, device=CPU), num_slots=3, max_model_len=128)
    scale = min(float(prompt.logits.abs().amax(1).min()) for prompt in loaded.reference)
    true_logits = runner.logits
    runner.logits = lambda plan: true_logits(plan) + 0.15 * scale  # type: ignore[method-assign]
    if is_within:
        assert self_check(runner, loaded) > 0.14 * scale
    else:
        with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
            self_check(runner, loaded)
