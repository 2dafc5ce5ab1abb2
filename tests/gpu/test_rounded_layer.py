"""A decoder layer whose rows are rounded by the kernels that make them, beside one that rounds them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

pytest.importorskip("triton", reason="a CPU torch comes without triton")
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from replicas.cuda.card_linear import card_linear
from replicas.cuda.quantised_card_linear import QuantisedCardLinear
from replicas.cuda.rounded_layer import RoundedLayer, rounded_layer
from replicas.layers.joined_attention import JoinedAttention
from replicas.layers.packed_weights import FP8
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.replaced_layers import before_serving, replace_layers, with_card_kernels
from replicas.layers.rounding import rotation, round_weights, round_weights_int4
from replicas.model.layer_check import check_layers, compare_layers
from replicas.model_support import UnsupportedModel
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind
from tests.engines.random_model import tiny_config

pytestmark = pytest.mark.interpreted

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SCHEMES = {
    "fp8": Scheme(WeightKind.FP8, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE),
    "int8": Scheme(WeightKind.INT8, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE),
    "int8 rotated": Scheme(WeightKind.INT8, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE),
    "int4": Scheme(WeightKind.INT4, Granularity.GROUP, Activations.NONE, Dialect.MADE_HERE, 32),
    "fp8 weights alone": Scheme(WeightKind.FP8, Granularity.CHANNEL, Activations.NONE, Dialect.MADE_HERE),
}


class PlainAttention(JoinedAttention):
    """Over the tokens of one prompt; paged is how many heads there are of q, and of k and v."""

    def attend(
        self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: tuple[int, int]
    ) -> torch.Tensor:
        dim = cos.shape[1]
        q, k, v = projected.split([paged[0] * dim, paged[1] * dim, paged[1] * dim], dim=1)
        q, k, v = (part.unflatten(1, (-1, dim)).transpose(0, 1) for part in (q, k, v))
        norms: Any = self
        if hasattr(self, "q_norm"):
            q, k = norms.q_norm(q), norms.k_norm(k)
        q, k = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None])
        out = F.scaled_dot_product_attention(q, k, v[None], is_causal=True, scale=self.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def quantised(module: nn.Module, kind: str) -> QuantisedLinear | None:
    if type(module) is not nn.Linear:
        return None
    weight, of = module.weight.detach(), SCHEMES[kind]
    if kind == "int4":
        packed = round_weights_int4(weight, 32)
    elif kind == "int8 rotated":
        packed = round_weights(weight, torch.int8, rotation(32, DTYPE, weight.device))
    else:
        packed = round_weights(weight, torch.int8 if of.kind is WeightKind.INT8 else FP8)
    return QuantisedLinear(packed, module.bias, of)


def model_of(kind: str, device: torch.device, config_class: str = "LlamaConfig", **changes: Any) -> Any:
    """With the card's layers, but the decoder layers of transformers. Weights of norms are no ones."""
    torch.manual_seed(5)
    config = tiny_config(config_class, **{"intermediate_size": 64, "num_hidden_layers": 1, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)
    for owner in list(model.model.modules()):  # the head stays as it is
        if "RMSNorm" in type(owner).__name__:
            owner.weight.data.uniform_(0.5, 1.5)
        for name, module in list(owner.named_children()):
            if (packed := quantised(module, kind)) is not None:
                setattr(owner, name, packed)
    model = model.to(device)
    replace_layers(model, before_serving(torch.device("cuda")))
    replace_layers(model, with_card_kernels(PlainAttention, card_linear, lambda module: None))
    return model


def with_rounded_layers(model: Any) -> int:
    """How many there are then."""
    found = [rounded_layer(layer) for layer in model.model.layers]
    for number, layer in enumerate(found):
        if layer is not None:
            model.model.layers[number] = layer
    return sum(layer is not None for layer in found)


@pytest.mark.parametrize(
    ("kind", "config_class", "changes", "lengths"),
    [
        ("fp8", "LlamaConfig", {}, (1, 70)),
        ("fp8", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}, (5,)),
        ("fp8", "Qwen3Config", {"head_dim": 16}, (5,)),
        ("int8", "MistralConfig", {"sliding_window": None}, (5,)),
    ],
)
@torch.inference_mode()
def test_computes_what_the_layer_does(
    kind: str, config_class: str, changes: dict[str, Any], lengths: tuple[int, ...], device: torch.device
) -> None:
    """With few rows and with many."""
    model = model_of(kind, device, config_class, **changes)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    ids = torch.randint(5, 90, (1, 70), device=device)
    tensors = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    wanted = [model(ids[:, :length], paged=heads).logits for length in lengths]
    assert with_rounded_layers(model) == model.config.num_hidden_layers
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == tensors
    for logits, length in zip(wanted, lengths, strict=True):
        found = model(ids[:, :length], paged=heads).logits
        assert found.shape == logits.shape
        # A number that the two round otherwise is a sixteenth off where it is one of fp8.
        assert float((found - logits).float().norm() / logits.float().norm()) < 0.03, length
    assert not any(module.arrived.any() for module in model.modules() if isinstance(module, QuantisedCardLinear))


@torch.inference_mode()
def test_a_row_is_the_same_alone_and_among_others(device: torch.device) -> None:
    """Up to the order of sums in products."""
    model = model_of("fp8", device)
    assert with_rounded_layers(model)
    layer, dim = model.model.layers[0], model.config.hidden_size
    torch.manual_seed(3)
    rows = torch.randn(70, dim, device=device).to(DTYPE)
    norm = layer.input_layernorm

    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, values, scales = torch.ops.splitserve.rounded_norm(x, x, norm.weight, norm.variance_epsilon, FP8)
        return values.float(), scales

    many = rounded(rows)
    for row in (0, 33, 69):
        alone = rounded(rows[row : row + 1])
        assert torch.equal(alone[0], many[0][row : row + 1])
        assert torch.equal(alone[1], many[1][row : row + 1])


def test_is_compiled_whole_for_any_number_of_rows(device: torch.device) -> None:
    model = model_of("fp8", device)
    assert with_rounded_layers(model)
    layer, heads = model.model.layers[0], (model.config.num_attention_heads, model.config.num_key_value_heads)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.manual_seed(3)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    for num_rows in (5, 7):
        x = torch.randn(1, num_rows, model.config.hidden_size, device=device).to(DTYPE)
        places = tuple(torch.randn(1, num_rows, head_dim, device=device).to(DTYPE) for _ in range(2))
        with torch.no_grad():
            wanted = layer(x, position_embeddings=places, paged=heads)
            assert torch.equal(compiled(x, position_embeddings=places, paged=heads), wanted)


def test_the_sum_is_compared_with_its_definition(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("fp8", device)
    assert with_rounded_layers(model)
    sums = [one for one in compare_layers(model, DTYPE) if one.name.endswith("mlp.down_proj, its sum")]
    assert len(sums) == 4
    assert max(one.error for one in sums) < 0.008
    right = QuantisedCardLinear.of_rounded_rows
    monkeypatch.setattr(QuantisedCardLinear, "of_rounded_rows", lambda *given, onto: right(*given, onto=1.05 * onto))
    with pytest.raises(UnsupportedModel, match=r"down_proj, its sum .* with 1 rows differs"):
        check_layers(model, DTYPE)


@pytest.mark.parametrize("kind", ["int4", "int8 rotated", "fp8 weights alone"])
def test_products_that_round_otherwise_are_left_alone(kind: str, device: torch.device) -> None:
    model = model_of(kind, device)
    assert with_rounded_layers(model) == 0


UNKNOWN_LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {"hidden_act": "gelu"}),
    ("MistralConfig", {"sliding_window": 16}),  # its attention stays transformers'
    ("Olmo2Config", {}),  # norms elsewhere
]


@pytest.mark.parametrize(("config_class", "changes"), UNKNOWN_LAYERS)
def test_layers_that_are_not_known_are_left_alone(
    config_class: str, changes: dict[str, Any], device: torch.device
) -> None:
    assert with_rounded_layers(model_of("fp8", device, config_class, **changes)) == 0


def test_a_layer_that_a_hook_looks_at_is_left_alone(device: torch.device) -> None:
    model = model_of("fp8", device)
    layer = model.model.layers[0]
    assert isinstance(rounded_layer(layer), RoundedLayer)
    layer.mlp.register_forward_hook(lambda *given: None)
    assert rounded_layer(layer) is None
