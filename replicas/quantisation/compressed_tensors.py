"""The quantization_config of compressed-tensors (0.8 to 0.20): one group of layers, all in one way. No torch.

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from replicas.quantisation.config_keys import ConfigKeys
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, Targets, WeightKind

# Who made it, or how the numbers were found: what they are is in the file.
_HARMLESS = ("global_compression_ratio", "version")
_HARMLESS_OF_NUMBERS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_KINDS = {
    ("float-quantized", "float", 8): WeightKind.FP8,
    ("naive-quantized", "float", 8): WeightKind.FP8,
    ("int-quantized", "int", 8): WeightKind.INT8,
    ("naive-quantized", "int", 8): WeightKind.INT8,
    ("pack-quantized", "int", 4): WeightKind.INT4,
}
_FORMATS = tuple(dict.fromkeys(format for format, _, _ in _KINDS))
_LINEAR = "Linear"


def read_compressed_tensors(keys: ConfigKeys) -> Scheme:
    """Raises UnsupportedModel naming the first key that is not understood."""
    format = keys.take_one("format", _FORMATS)
    keys.take_one("quantization_status", ("compressed", "frozen"), "compressed")
    sparsity = keys.take("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise keys.refusal("sparsity_config", sparsity, "dense weights")
    alone = _patterns(keys, "ignore")
    groups, has_kv_scales = keys.take("config_groups", {}), _has_kv_scales(keys)
    keys.refuse_rest(_HARMLESS)
    if not isinstance(groups, dict) or len(groups) != 1:
        raise keys.refusal("config_groups", list(groups), "one group: layers in unlike ways are not served")
    ((name, said),) = groups.items()
    scheme = _group(ConfigKeys(said, f"{keys.where}.config_groups.{name}"), format, alone)
    return replace(scheme, has_kv_scales=has_kv_scales)


def _has_kv_scales(keys: ConfigKeys) -> bool:
    """Of keys and values in e4m3, one for a layer: all that a pool here is stored by."""
    said = keys.take("kv_cache_scheme")
    if said is None:
        return False
    of = ConfigKeys(said, f"{keys.where}.kv_cache_scheme")
    of.take_one("type", ("float",), "int")
    of.take_one("num_bits", (8,), 8)
    of.take_one("strategy", ("tensor",), "tensor")
    of.take_one("symmetric", (True,), True)
    of.take_one("dynamic", (False,), False)
    of.refuse_rest(_HARMLESS_OF_NUMBERS)
    return True


def _group(keys: ConfigKeys, format: str, alone: tuple[str, ...]) -> Scheme:
    wanted = _patterns(keys, "targets")
    keys.take_one("format", (format,), format)
    weights = ConfigKeys(keys.take("weights"), f"{keys.where}.weights")
    said_activations = keys.take("input_activations")
    keys.refuse_rest()
    kind = _kind(weights, format)
    scheme = _weights(weights, kind, Targets(wanted, alone, has_head=True))
    if said_activations is None:
        return scheme
    activations = _activations(ConfigKeys(said_activations, f"{keys.where}.input_activations"), scheme)
    return replace(scheme, activations=activations)


def _kind(keys: ConfigKeys, format: str) -> WeightKind:
    type_name, num_bits = keys.take("type", "int"), keys.take("num_bits", 8)
    kind = _KINDS.get((format, type_name, num_bits))
    if kind is None:
        expected = [f"{bits} of type {name}" for of, name, bits in _KINDS if of == format]
        raise keys.refusal("num_bits", f"{num_bits} of type {type_name}", f"{' or '.join(expected)} with {format}")
    return kind


def _weights(keys: ConfigKeys, kind: WeightKind, targets: Targets) -> Scheme:
    is_int4 = kind is WeightKind.INT4
    group_size, block = keys.take("group_size"), keys.take("block_structure")
    granularity = Granularity(keys.take_one("strategy", _strategies(kind), _usual_strategy(group_size)))
    is_symmetric = keys.take_one("symmetric", (True, False) if is_int4 else (True,), True)
    keys.take_one("dynamic", (False,), False)
    order = keys.take("actorder")
    if order not in (None, False, "weight", "static", *(("group", "dynamic") if is_int4 else ())):
        raise keys.refusal("actorder", order, "weight, or none")
    keys.refuse_rest(_HARMLESS_OF_NUMBERS)
    scheme = Scheme(
        kind, granularity, Activations.NONE, Dialect.COMPRESSED_TENSORS, is_symmetric=is_symmetric,
        is_ordered=order in ("group", "dynamic"), targets=targets,
    )  # fmt: skip
    if granularity is Granularity.GROUP:
        if not isinstance(group_size, int) or group_size < 32 or group_size % 32:
            raise keys.refusal("group_size", group_size, "a multiple of 32")
        return replace(scheme, group_size=group_size)
    if granularity is Granularity.BLOCK:
        rows, columns = block_shape(keys, "block_structure", block)
        return replace(scheme, group_size=columns, block_rows=rows)
    return scheme


def _strategies(kind: WeightKind) -> tuple[str, ...]:
    if kind is WeightKind.INT4:
        return Granularity.GROUP, Granularity.CHANNEL
    usual = (Granularity.CHANNEL, Granularity.TENSOR)
    return (*usual, Granularity.BLOCK) if kind is WeightKind.FP8 else usual


def _usual_strategy(group_size: object) -> str:
    """As compressed-tensors infers it where it is left out."""
    if group_size is None:
        return Granularity.TENSOR
    return Granularity.CHANNEL if group_size == -1 else Granularity.GROUP


def block_shape(keys: ConfigKeys, name: str, said: Any) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    if isinstance(said, str):
        said = [int(part) for part in said.split("x") if part.isdigit()]
    sizes = said if isinstance(said, list | tuple) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 32 or size % 32 for size in sizes):
        raise keys.refusal(name, said, "two multiples of 32")
    return sizes[0], sizes[1]


def _activations(keys: ConfigKeys, weights: Scheme) -> Activations:
    type_of = {WeightKind.FP8: ("float", 8), WeightKind.INT8: ("int", 8)}.get(weights.kind)
    if type_of is None:
        raise keys.refusal("num_bits", keys.take("num_bits"), "none: with 4-bit weights activations stay as they are")
    keys.take_one("type", type_of[:1], "int")
    keys.take_one("num_bits", type_of[1:], 8)
    keys.take_one("symmetric", (True,), True)
    is_dynamic, group_size = keys.take_one("dynamic", (True, False), False), keys.take("group_size")
    expected = ("tensor",) if not is_dynamic else ("group",) if weights.granularity is Granularity.BLOCK else ("token",)
    # Of all tokens together it would be by one scale: a text would depend on its neighbours.
    keys.take_one("strategy", expected, "tensor")
    keys.refuse_rest(_HARMLESS_OF_NUMBERS)
    if not is_dynamic:
        return Activations.STATIC
    if expected == ("token",):
        return Activations.TOKEN
    if group_size != weights.group_size:
        raise keys.refusal("group_size", group_size, f"{weights.group_size}, as the weights' blocks have")
    return Activations.TOKEN_GROUP


def _patterns(keys: ConfigKeys, key: str) -> tuple[str, ...]:
    """Regular expressions of whole names: of one name, of an expression for how they begin, or of all."""
    patterns = []
    for name in keys.take_names(key):
        if name == _LINEAR:
            patterns.append(".*")
            continue
        pattern = f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name)
        try:
            patterns.append(re.compile(pattern).pattern)
        except re.error:
            raise keys.refusal(key, name, "regular expressions behind re:") from None
    return tuple(patterns)
