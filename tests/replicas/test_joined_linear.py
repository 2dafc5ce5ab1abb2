"""Joined projections compute what the separate ones compute, for any order of calls, and keep the weights once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from replicas.layers.joined_linear import JoinedLinear, ProjectionPart
from replicas.layers.linear import PlainLinear, join_linear_layers
from replicas.layers.replaced_layers import ReplacedLayers, before_serving, replace_layers

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

ROWS = ("joined_q_k_v", "joined_gate_up")
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {}),
    ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2Config", {}),  # biases in q, k, v only
    ("Qwen3Config", {"head_dim": 16}),
    ("Olmo2Config", {}),
    ("CohereConfig", {}),
]


def join_projections(model: nn.Module) -> ReplacedLayers:
    return replace_layers(model, [row for row in before_serving(torch.device("cpu")) if row.name in ROWS])


def replaced(num_qkv: int, num_gate_up: int, num_left_alone: int) -> ReplacedLayers:
    """num_left_alone: q, k, v."""
    made = dict(zip(ROWS, (num_qkv, num_gate_up), strict=True))
    return ReplacedLayers(made, dict(zip(ROWS, (num_left_alone, 0), strict=True)))


def tiny_model(config_class: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, config_class)(**{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # a new model's are zeros, which would hide a bias left out
            nn.init.normal_(parameter, std=0.5)
    return model.requires_grad_(False)


@pytest.mark.parametrize(("config_class", "changes"), KINDS, ids=[f"{row[0]}-{i}" for i, row in enumerate(KINDS)])
def test_same_logits_and_the_same_greedy_tokens(config_class: str, changes: dict[str, Any]) -> None:
    model = tiny_model(config_class, changes)
    ids = torch.tensor([[5, 17, 3, 88, 41, 60, 9]])
    logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=32, do_sample=False)
    num_bytes = weight_bytes(model)

    assert join_projections(model) == replaced(num_qkv=3, num_gate_up=3, num_left_alone=0)

    joined = model(ids).logits
    assert float((joined - logits).abs().max()) <= 1e-5 * float(logits.abs().max())
    assert torch.equal(model.generate(ids, max_new_tokens=32, do_sample=False), tokens)
    assert weight_bytes(model) == num_bytes


def weight_bytes(model: nn.Module) -> int:
    """Of every storage once, however many tensors look at it."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def test_a_second_time_does_nothing() -> None:
    model = tiny_model("LlamaConfig", {})
    join_projections(model)
    assert join_projections(model) == replaced(0, 0, 0)


class Attention(nn.Module):
    """Three projections by name, of whatever class."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q, k, v


class OtherLinear(nn.Linear):
    """As an adapter's or a quantised layer: not what nn.Linear computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Linear:
    linear = nn.Linear(8, 4)
    linear.register_forward_hook(lambda module, arguments, output: 2 * output)
    return linear


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(OtherLinear(8, 4), id="subclass"),
        pytest.param(hooked(), id="hook"),
        pytest.param(nn.Linear(9, 4), id="other input"),
        pytest.param(nn.Linear(8, 4, bias=False), id="no bias"),
        pytest.param(nn.Linear(8, 4, dtype=torch.bfloat16), id="other dtype"),
    ],
)
def test_what_is_not_alike_is_left_alone(part: nn.Module) -> None:
    attention = Attention(nn.Linear(8, 8), nn.Linear(8, 4), part)
    assert join_projections(attention) == replaced(0, 0, 1)
    assert attention.v_proj is part
    assert type(attention.q_proj) is nn.Linear


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_any_order_of_calls_and_inputs(order: tuple[int, ...]) -> None:
    """Also parts asked twice or never, and another input before the last one's parts were all taken."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, size) for size in (8, 4, 6)]
    linear = join_linear_layers(layers)
    assert linear is not None
    joined = JoinedLinear(linear, [layer.out_features for layer in layers])
    parts = [ProjectionPart(joined, index) for index in range(3)]
    with torch.inference_mode():
        for _ in range(3):
            x, y = torch.randn(2, 3, 8), torch.randn(1, 8)
            for index in order:
                for given in (x, y, x):
                    torch.testing.assert_close(parts[index](given), layers[index](given), rtol=1e-5, atol=1e-6)


class Interrupted(PlainLinear):
    """Something else is done in the middle of its next product."""

    meanwhile: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        return out


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_another_lanes_step_in_the_middle_of_a_product(num_taken: int) -> None:
    """Which takes so many of its parts there, and the others before this one goes on: none is the other's."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, size) for size in (8, 4, 6)]
    first, *others = [Interrupted(layer.weight, layer.bias) for layer in layers]
    linear = first.join(others)
    assert linear is not None
    joined = JoinedLinear(linear, [layer.out_features for layer in layers])
    x, y, taken = torch.randn(3, 8), torch.randn(5, 8), dict[int, torch.Tensor]()

    def other_lane() -> None:
        taken.update({index: joined.part(index, y) for index in range(num_taken)})

    with torch.inference_mode():
        linear.meanwhile = other_lane
        mine = [joined.part(0, x)]
        taken |= {index: joined.part(index, y) for index in range(num_taken, 3)}
        mine += [joined.part(index, x) for index in (1, 2)]
        for index, layer in enumerate(layers):
            torch.testing.assert_close(mine[index], layer(x), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(taken[index], layer(y), rtol=1e-5, atol=1e-6)


def test_two_threads_at_once() -> None:
    """As the two lanes of an engine on a CPU: each computes its own steps with the same modules."""
    model = tiny_model("LlamaConfig", {})
    join_projections(model)
    steps = [torch.randint(97, (1, length), generator=torch.Generator().manual_seed(length)) for length in (3, 7)]
    with torch.inference_mode():
        alone = [model(step).logits for step in steps]
    ready, wrong = threading.Barrier(2), list[int]()

    @torch.inference_mode()
    def run(index: int) -> None:
        ready.wait()
        wrong.extend(index for _ in range(40) if not torch.equal(model(steps[index]).logits, alone[index]))

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(run, range(2)))
    finally:
        sys.setswitchinterval(before_s)
    assert not wrong


def test_nothing_is_held_after_a_layer() -> None:
    model = tiny_model("LlamaConfig", {})
    join_projections(model)
    model(torch.tensor([[1, 2, 3]]))
    joined = [module for module in model.modules() if isinstance(module, JoinedLinear)]
    assert len(joined) == 6
    assert all(module._held.last is None for module in joined)


def test_one_graph_of_a_layer() -> None:
    """torch.compile sees no state that would split its graph."""
    model = tiny_model("LlamaConfig", {})
    layer = model.model.layers[0]
    x = torch.randn(1, 5, 32)
    embeddings = model.model.rotary_emb(x, torch.arange(5)[None])
    expected = layer(x, position_embeddings=embeddings)
    join_projections(model)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, position_embeddings=embeddings), expected, rtol=1e-5, atol=1e-6)
