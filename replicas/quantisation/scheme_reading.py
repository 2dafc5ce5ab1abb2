"""From a model's configuration to its scheme of quantisation, or to a refusal that names the key. No torch."""

from __future__ import annotations

from typing import Any

from replicas.model_support import UnsupportedModel, model_name
from replicas.quantisation.compressed_tensors import read_compressed_tensors
from replicas.quantisation.config_keys import ConfigKeys
from replicas.quantisation.other_dialects import read_awq, read_fp8, read_gptq
from replicas.quantisation.scheme import Activations, Dialect, Granularity, Scheme, WeightKind

_KEY = "quantization_config"
_INT8_ROTATION = 64
_READERS = {"compressed-tensors": read_compressed_tensors, "fp8": read_fp8, "awq": read_awq, "gptq": read_gptq}


def read_scheme(config: Any) -> Scheme | None:
    """Of a PretrainedConfig; None for a model that is not quantised. Raises UnsupportedModel."""
    said = getattr(config, _KEY, None) or getattr(config, "compression_config", None)
    if not said:
        return None
    said = said if isinstance(said, dict) else said.to_dict()
    keys = ConfigKeys(said, f"{model_name(config)}: {_KEY}")
    method = keys.take_one("quant_method", tuple(_READERS))
    return _READERS[method](keys)


def chosen_scheme(config: Any, quantise: str) -> Scheme | None:
    """The checkpoint's scheme, or the one that `model.quantise` asks for. Raises UnsupportedModel where there are both,
    and for a checkpoint whose scheme is not understood.
    """
    scheme = read_scheme(config)
    if quantise == "none":
        return scheme
    if scheme is not None:
        raise UnsupportedModel(
            f"{model_name(config)} is quantised as it is ({scheme.describe()}), so it can't be made {quantise} at "
            "load; leave model.quantise out"
        )
    return scheme_made_here(WeightKind(quantise))


def scheme_made_here(kind: WeightKind) -> Scheme:
    """Of weights that are rounded when they are loaded. The group size of int4 is known by the model's layers only, and
    how many inputs are rotated together may be fewer by them.
    """
    if kind is WeightKind.INT4:
        return Scheme(kind, Granularity.GROUP, Activations.NONE, Dialect.MADE_HERE, is_symmetric=False)
    # Small numbers of e4m3 have as many digits as large ones: what is spread over all of them costs some.
    rotation = _INT8_ROTATION if kind is WeightKind.INT8 else 0
    return Scheme(kind, Granularity.CHANNEL, Activations.TOKEN, Dialect.MADE_HERE, rotation=rotation)
