"""What is replaced in a model: by the table alone, with the same tensors, and open to other ways of keeping weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from replicas.kv.kv_pool import KvPool
from replicas.layers.attention_seam import use_attention
from replicas.layers.joined_attention import JoinedAttention
from replicas.layers.joined_linear import JoinedLinear
from replicas.layers.linear import LinearLayer, PlainLinear, plain_linear
from replicas.layers.place import each_layer
from replicas.layers.replaced_layers import (
    ReplacedLayers,
    Replacement,
    before_serving,
    replace_layers,
    with_card_kernels,
)
from replicas.model.attention import paged_attention
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from tests.engines.random_model import TINY, save_random_model, tiny_config

CPU, CARD = torch.device("cpu"), torch.device("cuda")
IDS = torch.tensor([[5, 17, 3, 88, 41, 60, 9]])


def tiny_model(config_class: str = "LlamaConfig", **changes: Any) -> Any:
    torch.manual_seed(5)
    config = tiny_config(config_class, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("device", "made"),
    [
        (CPU, {"joined_q_k_v": 3, "joined_gate_up": 3, "wide_head": 1}),
        (CARD, {"joined_q_k_v": 3, "joined_gate_up": 3}),
    ],
)
def test_what_was_replaced_is_told(
    device: torch.device, made: dict[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("replicas"), "propagate", True)
    model = tiny_model()
    none = dict.fromkeys(made, 0)
    with caplog.at_level(logging.INFO, "replicas"):
        assert replace_layers(model, before_serving(device)) == ReplacedLayers(made, none)
    (record,) = caplog.records
    assert (record.event, record.made, record.left_alone) == ("layers_replaced", made, none)  # type: ignore[attr-defined]
    assert record.levelno == logging.INFO
    assert replace_layers(model, before_serving(device)).made == none, "a second time there is nothing left to replace"


def test_a_model_that_has_none_of_the_usual_layers_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("replicas"), "propagate", True)
    with caplog.at_level(logging.INFO, "replicas"):
        assert replace_layers(tiny_model("GPT2Config"), before_serving(CPU)).made["joined_q_k_v"] == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_while_projections_are_joined_the_others_are_there_once() -> None:
    """Of ten layers, weights of two at most are there twice: of the one being joined, and of the one before."""
    model = tiny_model(num_hidden_layers=10)
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    parts = [weakref.ref(parameter) for name, parameter in model.named_parameters() if name.endswith(names)]
    assert len(parts) == 50
    still_there = []

    class Watched(PlainLinear):
        def join(self, others: Sequence[Self]) -> Self | None:
            joined = super().join(others)
            still_there.append(sum(part() is not None for part in parts))
            return joined

    def watched(module: nn.Module) -> Watched | None:
        layer = plain_linear(module)
        return None if layer is None else Watched(layer.weight, layer.bias)

    replace_layers(model, [Replacement("watched", partial(each_layer, make=watched)), *before_serving(CARD)])
    assert len(still_there) == 20
    for number, count in enumerate(still_there):
        num_joined = 3 * min(number, 10) + 2 * max(0, number - 10)
        assert count <= 50 - num_joined + 3, (number, count)
    assert not any(part() is not None for part in parts)


class Doubled(LinearLayer):
    """Another way to compute a product, to be told from the library's."""

    def __init__(self, inner: PlainLinear) -> None:
        super().__init__(inner.in_features, inner.out_features)
        self.weight = inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.linear(x, self.weight)


def doubled(module: nn.Module) -> Doubled | None:
    layer = plain_linear(module)
    return None if layer is None else Doubled(layer)


def test_a_layer_that_a_model_shares_stays_shared() -> None:
    shared = nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"one": nn.ModuleList([shared, nn.Linear(4, 4)]), "two": shared, "again": shared})
    made = replace_layers(model, [Replacement("doubled", partial(each_layer, make=doubled))]).made
    assert made == {"doubled": 2}
    first: Any = model["one"]
    assert isinstance(first[0], Doubled)
    assert first[0] is model["two"] is model["again"]
    assert first[0].weight is shared.weight


def test_embeddings_tied_to_the_head_stay_tied() -> None:
    model = tiny_model(tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight
    replace_layers(model, [Replacement("doubled", partial(each_layer, make=doubled))])
    assert isinstance(model.lm_head, Doubled)
    assert model.lm_head.weight is model.get_input_embeddings().weight is embeddings


class OwnAttention(JoinedAttention):
    """Over the prompt itself, by the functions of transformers."""

    def attend(self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Any) -> torch.Tensor:
        head_dim = cos.shape[-1]
        num_heads, num_kv_heads = paged
        heads = projected.unflatten(1, (-1, head_dim)).transpose(0, 1)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
        norms: Any = self
        if hasattr(self, "q_norm"):
            q, k = norms.q_norm(q), norms.k_norm(k)
        q, k = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None])
        out = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, scale=self.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    ("config_class", "changes", "num_known"),
    [
        ("LlamaConfig", {}, 3),
        ("LlamaConfig", {"attention_bias": True}, 3),
        ("Qwen3Config", {"head_dim": 16}, 3),
        ("MistralConfig", {"sliding_window": None}, 3),
        ("MistralConfig", {"sliding_window": 16}, 0),  # the kernels know no window
        ("Olmo2Config", {}, 0),  # another norm
    ],
)
def test_a_card_s_layers_compute_the_same_under_the_same_names(
    config_class: str, changes: dict[str, Any], num_known: int
) -> None:
    model = tiny_model(config_class, **changes)
    expected = model(IDS).logits
    replace_layers(model, before_serving(CARD))
    tensors = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    class Other(PlainLinear):
        """The card's."""

    def other(module: nn.Module) -> Other | None:
        layer = plain_linear(module)
        return None if layer is None else Other(layer.weight, layer.bias)

    seen: list[nn.Module] = []

    def layer(module: nn.Module) -> None:
        seen.append(module)

    made = replace_layers(model, with_card_kernels(OwnAttention, other, layer)).made
    num_linear = 3 * 4 + 1  # q k v, o, gate up, down; the head
    assert made == {"card_attention": num_known, "card_linear": num_linear, "card_layer": 0}
    assert sum(isinstance(module, JoinedAttention) for module in seen) == num_known, "layers come after their parts"
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == tensors
    assert not any(type(module) in (nn.Linear, PlainLinear) for module in model.modules())
    config = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    torch.testing.assert_close(model(IDS, paged=heads).logits, expected, rtol=1e-5, atol=1e-6)


class Int8Linear(LinearLayer):
    """Weights as int8 [out_features, in_features], and a scale for each output."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(numbers.shape[1], numbers.shape[0])
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)

    @classmethod
    def of(cls, module: nn.Module) -> Int8Linear | None:
        layer = plain_linear(module)
        if layer is None or layer.bias is not None:
            return None
        scales = layer.weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((layer.weight / scales).round().to(torch.int8), scales)

    def dequantised(self) -> torch.Tensor:
        out: torch.Tensor = self.numbers * self.scales  # type: ignore[operator]
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.numbers.float()) * self.scales[:, 0]  # type: ignore[index, operator]

    def join(self, others: Sequence[Self]) -> Int8Linear | None:
        parts: list[Any] = [self, *others]
        return Int8Linear(torch.cat([part.numbers for part in parts]), torch.cat([part.scales for part in parts]))


INT8 = Replacement("int8", partial(each_layer, make=Int8Linear.of))


def load_dequantised(folder: Path) -> LoadedModel:
    """A model whose weights are what Int8Linear makes of others: transformers' own logits of it are the reference."""
    save_random_model(tiny_config("LlamaConfig"), folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            layer = Int8Linear.of(module)
            if layer is not None:
                assert not torch.equal(module.weight, layer.dequantised())
                module.weight.copy_(layer.dequantised())
    model.save_pretrained(folder)
    return load_model(ModelSettings(str(folder), str(folder), "float32", 64, "auto", False), CPU)


def int8_model(folder: Path) -> tuple[Any, ReplacedLayers]:
    """As it will be with a quantised checkpoint: its layers stand in the model before what is joined is."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    use_attention(model, "splitserve_paged", paged_attention)
    return model, replace_layers(model, (INT8, *before_serving(CPU)))


@torch.inference_mode()
def test_other_weights_are_served_by_one_class_of_their_own(tmp_path: Path) -> None:
    """Joined in their own form, over the paged pool, beside each other: as transformers with the same numbers."""
    loaded = load_dequantised(tmp_path)
    model, replaced = int8_model(tmp_path)

    num_linear = 7 * TINY["num_hidden_layers"] + 1  # type: ignore[operator]
    assert replaced.made == {"int8": num_linear, "joined_q_k_v": 3, "joined_gate_up": 3, "wide_head": 0}
    assert not any(replaced.left_alone.values())
    joined = [module.linear for module in model.modules() if isinstance(module, JoinedLinear)]
    assert len(joined) == 6
    assert all(isinstance(linear, Int8Linear) for linear in joined)
    assert not any(name.endswith("_proj.weight") for name in model.state_dict()), "in one form only"

    ours = replace(loaded, model=model)
    runner = ModelRunner(ours, KvPool(ours.kv_layout(8), 64, CPU), 4, 64)
    assert self_check(runner, ours) > 0.0
    joined[-1].scales[0] *= 1.5
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        self_check(runner, ours)


def test_weights_of_unlike_kinds_are_not_joined() -> None:
    model = tiny_model(num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    expected = model(IDS).logits
    attention.v_proj = Int8Linear.of(attention.v_proj)
    replaced = replace_layers(model, before_serving(CARD))
    assert replaced == ReplacedLayers(
        {"joined_q_k_v": 0, "joined_gate_up": 1}, {"joined_q_k_v": 1, "joined_gate_up": 0}
    )
    assert isinstance(attention.v_proj, Int8Linear)
    assert type(attention.q_proj) is nn.Linear
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0.05, atol=0.02)
