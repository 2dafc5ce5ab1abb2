"""Puts a model with quantised linear layers together, a layer at a time: nothing of it is ever there in full.

The model is built without memory. Each layer that its scheme names is read, or made random, and packed, or rounded,
where it is to be; everything else is read as it is. What does not fit exactly is refused, as in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from replicas.layers.packed_weights import FP8, PackedWeights
from replicas.layers.place import Place
from replicas.layers.quantised_linear import QuantisedLinear
from replicas.layers.rounding import round_rows, round_weights, round_weights_int4
from replicas.model.checkpoint import made_anew, refuse_untied
from replicas.model.checkpoint_files import number_types, weight_files
from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some
from replicas.model.stored_weights import StoredLayer, packed_weights, stored_names
from replicas.model_support import UnsupportedModel, model_name
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind

_DTYPES = {WeightKind.FP8: FP8, WeightKind.INT8: torch.int8}
_INT4_GROUPS = (128, 64)  # of weights that are rounded here: the first that divides every row
_RANDOM_INPUTS_WITHIN = 8.0  # what a made-up scale of activations reaches


@dataclass(slots=True)
class _Files:
    """Tensors of a checkpoint, by name, and which of them were read. Reads one at a time, onto the device."""

    of: dict[str, Path]
    device: torch.device
    read_names: set[str] = field(default_factory=set)

    @staticmethod
    def open(folder: str, config: Any, device: torch.device) -> _Files:
        """Raises CheckpointMismatch for what is not all safetensors."""
        where = Path(folder)
        if not where.is_dir():
            where = Path(snapshot_download(folder, allow_patterns=["*.json", "*.safetensors"]))
        files = weight_files(where, getattr(config, "transformers_weights", None))
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise CheckpointMismatch(
                f"{folder} has no *.safetensors, which quantised models are read from; save it with "
                "safe_serialization, or serve it without model.quantise"
            )
        number_types(files)  # no name twice
        of: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                of |= dict.fromkeys(opened.keys(), file)
        return _Files(of, device)

    def read(self, name: str) -> torch.Tensor:
        """Memory of its own: what is mapped from a file changes with it."""
        self.read_names.add(name)
        with safe_open(self.of[name], framework="pt", device=str(self.device)) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor.clone() if self.device.type == "cpu" else tensor

    def numbers(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Of a tensor that is not quantised. Raises CheckpointMismatch."""
        if name not in self.of:
            raise CheckpointMismatch(f"the checkpoint does not fit its config.json: it lacks {name}")
        found = self.read(name)
        if found.shape != shape:
            raise CheckpointMismatch(
                f"the checkpoint does not fit its config.json: of another shape: {name} ({list(found.shape)} instead "
                f"of {list(shape)})"
            )
        if not found.is_floating_point() or found.element_size() < 2:
            kind = str(found.dtype).removeprefix("torch.")
            raise CheckpointMismatch(f"{name} is stored as {kind}, though its config says that it is not quantised")
        return found


def read_quantised(
    folder: str, config: Any, scheme: Scheme, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """The model with its weights, on the device. folder: of config.json and weights, or a Hub id. What is not quantised
    comes to be of this type. Blocks for seconds to minutes. Raises CheckpointMismatch naming tensors.
    """
    model: Any = _empty(config, dtype, trust_remote_code)
    scheme = _for_layers(scheme, model)
    try:
        files = _Files.open(folder, config, device)
        for name, place in _quantised_places(model, scheme):
            place.put(_read_layer(files, name, place.layer, scheme, dtype))
        _read_others(files, model, dtype)
    except SafetensorError as error:
        raise CheckpointMismatch(
            f"a *.safetensors file of {folder} is not whole: {error}; was it copied or downloaded to its end?"
        ) from error
    is_made_anew = made_anew(model)
    left = sorted(name for name in files.of.keys() - files.read_names if not is_made_anew.search(name))
    if left:
        raise CheckpointMismatch(
            f"the checkpoint does not fit its config.json: the model has no place for {name_some(left)}"
        )
    refuse_untied(model)
    loaded: nn.Module = model
    return loaded


def random_quantised(
    config: Any, scheme: Scheme, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """Random weights of the right shapes and kinds, the same in every replica."""
    torch.manual_seed(0)
    model: Any = _empty(config, dtype, trust_remote_code)
    scheme = _for_layers(scheme, model)
    to_quantise = dict(_quantised_places(model, scheme))
    for name in [name for name, _ in model.named_modules()]:  # names alone: a layer that is packed goes
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, _frozen(torch.empty_like(parameter, device=device)))
        model._init_weights(module)
        if name in to_quantise:
            weights = _made_up(module.weight.detach(), scheme)
            to_quantise[name].put(QuantisedLinear(weights, module.bias, scheme))
    model.tie_weights()
    made: nn.Module = model
    return made


def scheme_of(model: nn.Module) -> Scheme | None:
    """Of a model's quantised layers, with their group size; None for a model without any."""
    return next((module.scheme for module in model.modules() if isinstance(module, QuantisedLinear)), None)


def _empty(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """Without memory for parameters. Raises UnsupportedModel for layers that are not quantised here."""
    config = type(config).from_dict(
        {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    )
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    experts = [name for name, tensor in model.named_parameters() if tensor.dim() > 2 or ".experts." in name]
    if experts:
        raise UnsupportedModel(
            f"{model_name(config)} has experts ({name_some(experts)}): quantised weights are served of models without; "
            "serve its unquantised checkpoint"
        )
    if kept := (model._keep_in_fp32_modules or getattr(model, "_keep_in_fp32_modules_strict", None)):
        raise UnsupportedModel(
            f"{model_name(config)} keeps {name_some(sorted(kept))} in float32: quantised weights are served of models "
            "that do not; serve its unquantised checkpoint"
        )
    empty: nn.Module = model
    return empty


def _quantised_places(model: Any, scheme: Scheme) -> Iterator[tuple[str, Place]]:
    """Linear layers that the scheme names, and where they stand."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and scheme.targets.has(name, module is head):
            owner, _, own_name = name.rpartition(".")
            yield name, Place(model.get_submodule(owner), own_name)


def _for_layers(scheme: Scheme, model: nn.Module) -> Scheme:
    """With the group size that the model's layers have, where that is not said. Raises UnsupportedModel."""
    layers = {name: place.layer.in_features for name, place in _quantised_places(model, scheme)}
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no linear layers to quantise ({scheme.describe()}); serve its unquantised "
            "checkpoint, without model.quantise"
        )
    if scheme.dialect is not Dialect.MADE_HERE or scheme.granularity is not Granularity.GROUP:
        return scheme
    for size in _INT4_GROUPS:
        others = [name for name, num_inputs in layers.items() if num_inputs % size]  # type: ignore[operator]
        if not others:
            return replace(scheme, group_size=size)
    raise UnsupportedModel(
        f"model.quantise: int4 wants rows of multiples of {_INT4_GROUPS[-1]} weights, but {name_some(others)} have "
        "others; set int8 or fp8"
    )


def _read_layer(files: _Files, name: str, linear: Any, scheme: Scheme, dtype: torch.dtype) -> QuantisedLinear:
    prefix = f"{name}."
    if scheme.dialect is Dialect.MADE_HERE:
        weights = _rounded(files.numbers(f"{prefix}weight", linear.weight.shape), scheme)
    else:
        has = frozenset(key for key in stored_names(scheme) if prefix + key in files.of)
        stored = StoredLayer(name, linear.out_features, linear.in_features, has, lambda key: files.read(prefix + key))
        weights = packed_weights(stored, scheme)
    bias = None
    if linear.bias is not None:
        bias = _frozen(files.numbers(f"{prefix}bias", linear.bias.shape).to(dtype))
    elif scheme.dialect in (Dialect.GPTQ, Dialect.GPTQ_V2) and f"{prefix}bias" in files.of:
        _refuse_bias(files, f"{prefix}bias")
    return QuantisedLinear(weights, bias, scheme)


def _refuse_bias(files: _Files, name: str) -> None:
    """Of a layer that has none. Zeros are well: some writers give every layer a bias."""
    if bool(files.read(name).any()):
        raise CheckpointMismatch(f"the checkpoint does not fit its config.json: the model has no place for {name}")


def _rounded(weight: torch.Tensor, scheme: Scheme) -> PackedWeights:
    """A matrix that is not quantised."""
    if scheme.kind is WeightKind.INT4:
        return round_weights_int4(weight, scheme.group_size or weight.shape[1])
    return round_weights(weight, _DTYPES[scheme.kind])


def _made_up(weight: torch.Tensor, scheme: Scheme) -> PackedWeights:
    """Random weights as the scheme has them, whoever would store them."""
    if scheme.kind is WeightKind.INT4 or scheme.dialect is Dialect.MADE_HERE:
        return _rounded(weight, scheme)
    size = scheme.group_size or weight.shape[1]
    dtype = _DTYPES[scheme.kind]
    values, scales = round_rows(weight, dtype, size)
    input_scale = None
    if scheme.activations is Activations.STATIC:
        largest = 448.0 if dtype is FP8 else 127.0
        input_scale = torch.full((1,), _RANDOM_INPUTS_WITHIN / largest, device=weight.device)
    return PackedWeights(values.contiguous(), scales, size, input_scale=input_scale)


def _read_others(files: _Files, model: Any, dtype: torch.dtype) -> None:
    """Whatever is not of a quantised layer. Tied weights are read once, and must be equal where a file has both."""
    tied: dict[str, str] = {}
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        tied = dict(model.all_tied_weights_keys)
    kept = model.state_dict().keys()  # other buffers are made anew
    for owner_name, module in list(model.named_modules()):
        if isinstance(module, QuantisedLinear):
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{owner_name}.{key}" if owner_name else key
            if name in tied and name not in files.of:
                continue
            tensor = files.numbers(name, parameter.shape).to(dtype)
            module.register_parameter(key, _frozen(tensor))
        for key, buffer in list(module.named_buffers(recurse=False)):
            name = f"{owner_name}.{key}" if owner_name else key
            if name in kept:
                module.register_buffer(key, files.numbers(name, buffer.shape).to(buffer.dtype))
    for name, source in tied.items():
        if name in files.of and not torch.equal(model.get_parameter(name), model.get_parameter(source)):
            raise CheckpointMismatch(
                f"config.json has tie_word_embeddings: true, but the checkpoint has {name} that is unlike {source}; "
                "say tie_word_embeddings: false if it is meant"
            )
    if tied:
        model.tie_weights()


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
