"""What a device computes of each quantised layer is compared with its definition; rounding hides no fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.kv.kv_pool import KvPool
from replicas.layers.further_products import FurtherProduct
from replicas.layers.packed_weights import FP8
from replicas.layers.place import Place
from replicas.layers.quantised_linear import QuantisedLinear, whole_inputs
from replicas.model.layer_check import check_layers, compare_layers
from replicas.model.model_loader import LoadedModel, load_model
from replicas.model.model_runner import ModelRunner
from replicas.model.self_check import self_check
from replicas.model_support import UnsupportedModel
from replicas.settings import ModelSettings
from tests.replicas.quantised_checkpoints import tiny_llama

CPU = torch.device("cpu")
KINDS = ("fp8", "int8", "int4")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedModel]:
    tiny_llama(intermediate_size=128, num_hidden_layers=4).save_pretrained(tmp_path)

    def load(kind: str, dtype: str = "bfloat16", kv_dtype: str = "auto") -> LoadedModel:
        return load_model(ModelSettings(str(tmp_path), "", dtype, 128, "auto", False, kind), CPU, kv_dtype)

    return load


class DeviceLinear(QuantisedLinear):
    """As a device would have it: it differs from the definition by rounding, and by `fault`."""

    fault = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * (1 + 2.0**-8)
        if self.fault == "tail":
            left = x.clone()
            left[..., :-2] = 0.0
            out = out - super().forward(left)
        if self.fault == "one row" and x.flatten(0, -2).shape[0] == 1:
            out[..., 3] += out.abs().max()
        if self.fault == "many rows" and x.flatten(0, -2).shape[0] > 64:
            out[..., -1, :] = 0.0
        if self.fault == "zeros":
            out = out / (x.abs().amax(-1, keepdim=True) / x.abs().amax(-1, keepdim=True))
        return out


def on_a_device(loaded: LoadedModel, faults: dict[str, str]) -> list[str]:
    """Put such layers in; names of all of them."""
    names = [name for name, module in loaded.model.named_modules() if isinstance(module, QuantisedLinear)]
    for name in names:
        layer = loaded.model.get_submodule(name)
        assert isinstance(layer, QuantisedLinear)
        made = DeviceLinear(layer.weights, layer.bias, layer.scheme)
        made.fault = faults.get(name, "none")
        owner, _, own_name = name.rpartition(".")
        Place(loaded.model.get_submodule(owner), own_name).put(made)
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_differ_by_rounding_are_right(load: Callable[..., LoadedModel], kind: str) -> None:
    loaded = load(kind)
    assert check_layers(loaded.model, loaded.dtype) == 0.0, "the definition itself is not compared"
    names = on_a_device(loaded, {})
    compared = list(compare_layers(loaded.model, loaded.dtype))
    assert len(compared) == 4 * len(names) == 4 * 16
    assert 0.0 < check_layers(loaded.model, loaded.dtype) < 0.008


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "num_rows"), [("tail", 1), ("one row", 1), ("many rows", 100), ("zeros", 35)]
)  # fmt: skip
def test_the_layer_at_fault_is_named(
    load: Callable[..., LoadedModel], kind: str, fault: str, num_rows: int
) -> None:  # fmt: skip
    loaded = load(kind)
    on_a_device(loaded, {"model.layers.2.mlp.down_proj": fault, "model.layers.3.mlp.down_proj": fault})
    found = rf"LlamaForCausalLM: model\.layers\.2\.mlp\.down_proj \(\d+ x 128\) with {num_rows} rows differs"
    with pytest.raises(UnsupportedModel, match=found):
        check_layers(loaded.model, loaded.dtype)


class Maker(torch.nn.Module):
    """Has what a layer's product is added to, added within it; by `fault` to twice of it."""

    def __init__(self, linear: torch.nn.Module, fault: bool) -> None:
        super().__init__()
        self.linear, self.fault = linear, fault

    def further_products(self) -> list[FurtherProduct]:
        def compute(x: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
            return onto * (2 if self.fault and len(x) > 64 else 1) + self.linear(x)

        return [FurtherProduct("sum", self.linear, compute, torch.add)]


@pytest.mark.parametrize("fault", [False, True])
def test_what_a_layer_makes_of_anothers_product_is_compared_too(
    load: Callable[..., LoadedModel], fault: bool
) -> None:  # fmt: skip
    loaded = load("int4")
    names = on_a_device(loaded, {})
    loaded.model.add_module("maker", Maker(loaded.model.get_submodule(names[-1]), fault))
    compared = list(compare_layers(loaded.model, loaded.dtype))
    sums = [one for one in compared if one.name == f"{names[-1]}, its sum"]
    assert [one.num_rows for one in sums] == [1, 35, 64, 100]
    assert [one.is_right for one in sums] == [True, True, True, not fault]
    assert len(compared) == 4 * (len(names) + 1)


class Tap(torch.nn.Module):
    """Passes all of a layer's names on, as what looks at layers' inputs does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def test_what_a_wrapped_layer_makes_is_compared_once(load: Callable[..., LoadedModel]) -> None:
    loaded = load("int4")
    names = on_a_device(loaded, {})
    tap = Tap(Maker(loaded.model.get_submodule(names[-1]), False))
    assert tap.further_products()[0].name == "sum"
    loaded.model.add_module("tap", tap)
    compared = [one.name for one in compare_layers(loaded.model, loaded.dtype)]
    assert compared.count(f"{names[-1]}, its sum") == 4
    assert len(compared) == 4 * (len(names) + 1)


class Large(Maker):
    """Makes numbers that float16 does not have, as gates of unusual inputs are."""

    def further_products(self) -> list[FurtherProduct]:
        def large(product: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
            return product.float() * 1e6

        return [FurtherProduct("large", self.linear, lambda x, onto: large(self.linear(x), onto).half(), large)]


def test_numbers_beyond_the_type_are_not_wrong(load: Callable[..., LoadedModel]) -> None:
    loaded = load("int4", "float16")
    names = on_a_device(loaded, {})
    loaded.model.add_module("maker", Large(loaded.model.get_submodule(names[-1]), False))
    compared = [one for one in compare_layers(loaded.model, loaded.dtype) if one.name.startswith(names[-1])]
    assert len(compared) == 8
    assert all(one.is_right for one in compared)


def test_a_refusal_for_logits_tells_whether_a_quantised_layer_is_at_fault(load: Callable[..., LoadedModel]) -> None:
    loaded = load("fp8")
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(8), 32, CPU), num_slots=3, max_model_len=128)
    on_a_device(loaded, {})
    self_check(runner, loaded)
    loaded.model.get_submodule("model.norm").weight.data.neg_()
    with pytest.raises(UnsupportedModel, match=r"wrong text\. It is not its quantised layers: model\.layers\.\d"):
        self_check(runner, loaded)
    on_a_device(loaded, {"model.layers.1.mlp.down_proj": "tail"})
    with pytest.raises(UnsupportedModel, match=r"first quantised layer that is wrong: model\.layers\.1\.mlp\.down"):
        self_check(runner, loaded)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_how_far_rounded_inputs_move_logits_is_known(
    load: Callable[..., LoadedModel], kind: str, kv_dtype: str
) -> None:
    for prompt in load(kind, kv_dtype=kv_dtype).reference:
        assert prompt.moved is not None
        assert prompt.moved.shape == (len(prompt.logits),)
        assert bool(((prompt.moved > 0) & (prompt.moved < 0.5 * prompt.logits.abs().amax(1))).all())


@pytest.mark.parametrize("kind", ["none", "int4"])
def test_of_inputs_that_are_not_rounded_nothing_is_asked(load: Callable[..., LoadedModel], kind: str) -> None:
    assert all(prompt.moved is None for prompt in load(kind, kv_dtype="fp8").reference)


def moved_by(loaded: LoadedModel, by: float) -> LoadedModel:
    return replace(
        loaded,
        reference=tuple(replace(one, moved=torch.full((len(one.logits),), by)) for one in loaded.reference),
    )


@pytest.mark.parametrize(("off", "is_within"), [(0.3, True), (0.7, False)])
def test_where_rounding_moves_logits_far_they_may_differ_as_far(
    load: Callable[..., LoadedModel], off: float, is_within: bool
) -> None:
    loaded = load("fp8")
    scale = min(float(prompt.logits.abs().amax(1).min()) for prompt in loaded.reference)
    loaded = moved_by(loaded, 0.45 * scale)
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(8), 32, CPU), num_slots=3, max_model_len=128)
    true_logits = runner.logits
    runner.logits = lambda plan: true_logits(plan) + off * scale  # type: ignore[method-assign]
    if is_within:
        assert self_check(runner, loaded) > 0.29 * scale
    else:
        with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
            self_check(runner, loaded)


def test_logits_that_have_nothing_in_common_are_refused_however_far_rounding_moves_them(
    load: Callable[..., LoadedModel],
) -> None:
    loaded = moved_by(load("fp8"), 1e9)
    runner = ModelRunner(loaded, KvPool(loaded.kv_layout(8), 32, CPU), num_slots=3, max_model_len=128)
    true_logits = runner.logits
    runner.logits = lambda plan: true_logits(plan).roll(1, -1)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        self_check(runner, loaded)


def test_inputs_are_rounded_again_behind_whole_ones(load: Callable[..., LoadedModel]) -> None:
    torch.manual_seed(0)
    model = load("fp8").model
    layer = next(module for module in model.modules() if isinstance(module, QuantisedLinear))
    assert layer.values.dtype is FP8
    x = torch.randn(3, layer.in_features).bfloat16()
    rounded = layer(x)
    whole = []

    def failing() -> None:
        with whole_inputs(model):
            whole.append(layer(x))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not torch.equal(whole[0], rounded)
    assert torch.equal(layer(x), rounded)
