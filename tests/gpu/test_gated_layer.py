"""A decoder layer whose gate and last sum are made within its products, beside transformers' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton", reason="a CPU torch comes without triton")
import torch.nn.functional as F
from torch import nn

from replicas.cuda import skinny_linear
from replicas.cuda.card_layers import card_layer
from replicas.cuda.card_linear import card_linear
from replicas.cuda.gated_layer import GatedLayer, gated_layer
from replicas.cuda.int4_card_linear import Int4CardLinear
from replicas.cuda.rounded_layer import RoundedLayer
from replicas.layers.linear import PlainLinear
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.replaced_layers import before_serving, replace_layers, with_card_kernels
from replicas.layers.rounding import round_weights_int4
from replicas.model.layer_check import check_layers, compare_layers
from replicas.model_support import UnsupportedModel
from tests.engines.random_model import tiny_config
from tests.gpu.paged_case import TOLERANCE, relative_error
from tests.gpu.test_rounded_layer import DTYPE, SCHEMES, UNKNOWN_LAYERS, PlainAttention, quantised

pytestmark = pytest.mark.interpreted


def model_of(kind: str, device: torch.device, config_class: str = "LlamaConfig", **changes: Any) -> Any:
    """Of such weights ("none": of 16 bits), with the card's layers but those of the decoder."""
    torch.manual_seed(5)
    config = tiny_config(config_class, **{"intermediate_size": 96, "num_hidden_layers": 1, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)
    for owner in list(model.model.modules()):  # the head stays as it is
        if "RMSNorm" in type(owner).__name__:
            owner.weight.data.uniform_(0.5, 1.5)
        for name, module in list(owner.named_children()):
            if type(module) is nn.Linear:
                module.weight.data.mul_(4)  # else an MLP adds next to nothing to what goes past it
            if kind != "none" and (packed := quantised(module, kind)) is not None:
                setattr(owner, name, packed)
    model = model.to(device)
    replace_layers(model, before_serving(torch.device("cuda")))
    for module in model.modules():
        if isinstance(module, PlainLinear):  # which lie otherwise on a CPU
            module.weight = nn.Parameter(module.weight.contiguous(), requires_grad=False)
    replace_layers(model, with_card_kernels(PlainAttention, card_linear, lambda module: None))
    return model


def heads_of(model: Any) -> tuple[int, int]:
    return model.config.num_attention_heads, model.config.num_key_value_heads


def inputs_of(model: Any, num_rows: int, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.manual_seed(num_rows)
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    places = tuple(torch.rand(1, num_rows, head_dim, device=device).to(DTYPE) for _ in range(2))
    x = torch.randn(1, num_rows, model.config.hidden_size, device=device).to(DTYPE)
    return x, {"position_embeddings": places, "paged": heads_of(model)}


KINDS = ["none", "int4"]
ROWS = [1, 2, 33, 70]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("has_biases", [False, True], ids=["no biases", "biases"])
@torch.inference_mode()
def test_computes_what_the_layer_does(kind: str, num_rows: int, has_biases: bool, device: torch.device) -> None:
    """Transformers' own, whose sums and gate are torch's."""
    model = model_of(kind, device, mlp_bias=has_biases)
    for linear in (model.model.layers[0].mlp.gate_proj.joined.linear, model.model.layers[0].mlp.down_proj):
        assert (linear.bias is not None) == has_biases
        if has_biases:
            linear.bias.data.normal_()
    layer = model.model.layers[0]
    x, given = inputs_of(model, num_rows, device)
    wanted = layer(x, **given)
    gated = card_layer(layer)
    assert isinstance(gated, GatedLayer)
    found = gated(x, **given)
    assert found.shape == wanted.shape
    assert found.dtype is DTYPE
    assert relative_error(found, wanted.double().cpu()) < TOLERANCE[DTYPE]
    assert relative_error(found - x, (wanted - x).double().cpu()) < 2 * TOLERANCE[DTYPE]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", ROWS)
@torch.inference_mode()
def test_products_are_rounded_where_they_are_apart(kind: str, num_rows: int, device: torch.device) -> None:
    """The gate and the sum beside those of the same layers' own products, rounded to 16 bits."""
    model = model_of(kind, device)
    mlp, (x, _) = model.model.layers[0].mlp, inputs_of(model, num_rows, device)
    gate_up, down = mlp.gate_proj.joined.linear, mlp.down_proj
    gate, up = gate_up(x).float().chunk(2, -1)
    gates = gate_up.gated(x)
    assert gates.shape == (1, num_rows, mlp.gate_proj.joined.sizes[0])
    assert relative_error(gates, (F.silu(gate) * up).to(DTYPE).double().cpu()) < TOLERANCE[DTYPE]
    alone, added = down(gates), down.added(gates, x)
    assert added.shape == x.shape
    assert relative_error(added, (x + alone).double().cpu()) < TOLERANCE[DTYPE] / 4
    if num_rows > 64:  # one and the same product of the library's
        assert torch.equal(added, x + alone)
    assert not any(module.arrived.any() for module in (gate_up, down))


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@torch.inference_mode()
def test_inputs_are_in_the_order_of_the_weights(num_rows: int, device: torch.device) -> None:
    """Of 4 bits, that were rounded in another one than inputs come in."""
    torch.manual_seed(6)
    packed = replace(round_weights_int4(torch.randn(64, 64), 32), order=torch.randperm(64))
    made: Any = card_linear(QuantisedLinear(packed, None, SCHEMES["int4"]).to(device))
    x, onto = (torch.randn(num_rows, 64).to(DTYPE).to(device) for _ in range(2))
    gate, up = made(x).float().chunk(2, 1)
    assert relative_error(made.gated(x), (F.silu(gate) * up).double().cpu()) < TOLERANCE[DTYPE]
    assert relative_error(made.added(x, onto), (onto + made(x)).double().cpu()) < TOLERANCE[DTYPE]


def test_what_is_made_within_a_product_is_compared_with_its_definition(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("int4", device)
    model.model.layers[0] = gated_layer(model.model.layers[0])
    compared = list(compare_layers(model, DTYPE))
    assert [one.name.split(", its ")[1] for one in compared if ", its" in one.name] == 4 * ["gate"] + 4 * ["sum"]
    assert max(one.error for one in compared) < 0.008
    for way, name in (("added", r"down_proj, its sum"), ("gated", r"gate_proj\.joined\.linear, its gate")):
        right = getattr(Int4CardLinear, way)
        monkeypatch.setattr(Int4CardLinear, way, lambda *given, right=right: 1.05 * right(*given))
        found = rf"layers\.0\.mlp\.{name} \(\d+ x \d+\) with 1 rows differs"
        with pytest.raises(UnsupportedModel, match=found):
            check_layers(model, DTYPE)


@torch.inference_mode()
def test_of_a_whole_model(device: torch.device) -> None:
    """Of every kind that is known, and whose tensors stay where they are."""
    for config_class in ("LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"):
        changes = {"sliding_window": None} if config_class == "MistralConfig" else {}
        model = model_of("none", device, config_class, num_hidden_layers=2, **changes)
        ids = torch.randint(5, 90, (1, 9), device=device)
        wanted = model(ids, paged=heads_of(model)).logits
        tensors = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = gated_layer(layer)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == tensors
        found = model(ids, paged=heads_of(model)).logits
        assert relative_error(found, wanted.double().cpu()) < 4 * TOLERANCE[DTYPE], config_class


@pytest.mark.parametrize("kind", KINDS)
def test_is_compiled_whole_for_any_number_of_rows(kind: str, device: torch.device) -> None:
    model = model_of(kind, device)
    layer = gated_layer(model.model.layers[0])
    assert layer is not None
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for num_rows in (5, 7):
        x, given = inputs_of(model, num_rows, device)
        with torch.no_grad():
            assert torch.equal(compiled(x, **given), layer(x, **given))


@torch.inference_mode()
def test_a_part_of_a_card_has_its_own_product_of_many_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the gate and the sum are made of."""
    model = model_of("none", device)
    layer = gated_layer(model.model.layers[0])
    assert layer is not None
    asked: list[tuple[int, ...]] = []

    class Part:
        def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            asked.append(tuple(weight.shape))
            return F.linear(rows, weight)

    x, given = inputs_of(model, 70, device)
    wanted = layer(x, **given)
    monkeypatch.setattr(skinny_linear, "part_here", Part)
    assert torch.equal(layer(x, **given), wanted)
    size, inner = model.config.hidden_size, model.config.intermediate_size
    assert asked[-2:] == [(2 * inner, size), (size, inner)]
    assert len(asked) == 4


@pytest.mark.parametrize(("config_class", "changes"), UNKNOWN_LAYERS)
def test_layers_that_are_not_known_are_left_alone(
    config_class: str, changes: dict[str, Any], device: torch.device
) -> None:
    assert card_layer(model_of("none", device, config_class, **changes).model.layers[0]) is None


@pytest.mark.parametrize("kind", ["int8 rotated", "fp8 weights alone", "fp8"])
def test_products_of_8_bits_are_not_gated_so(kind: str, device: torch.device) -> None:
    layer = model_of(kind, device).model.layers[0]
    assert gated_layer(layer) is None
    assert isinstance(card_layer(layer), RoundedLayer) == (kind == "fp8")


@pytest.mark.parametrize("name", ["mlp", "mlp.act_fn", "mlp.down_proj", "post_attention_layernorm", "mlp.up_proj"])
def test_a_layer_that_a_hook_looks_into_is_left_alone(name: str, device: torch.device) -> None:
    layer = model_of("none", device).model.layers[0]
    assert isinstance(gated_layer(layer), GatedLayer)
    layer.get_submodule(name).register_forward_hook(lambda *given: None)
    assert gated_layer(layer) is None


def test_a_layer_without_the_cards_products_is_left_alone(device: torch.device) -> None:
    """As every one is on a CPU, and one of float32 on a card."""
    model = model_of("none", device)
    layer = model.model.layers[0]
    down = layer.mlp.down_proj
    layer.mlp.down_proj = nn.Linear(down.in_features, down.out_features, bias=False)
    assert gated_layer(layer) is None
