"""How the positions of a GGUF model turn its queries and keys: as transformers' rope_parameters, or refused.

llama.cpp divides the frequency of a pair of dimensions by its factor (tensor rope_freqs) and by rope.scaling.factor,
the latter for type yarn only where that type says so. Type linear where none is given; none scales nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from replicas.gguf.architecture import LONG_ROPE_FACTORS, ROPE_FACTORS
from replicas.gguf.file import GgufFile

# Settings that rope_parameters come from. What is left of rope.* is `settings`' business.
ROPE_SETTINGS = frozenset(
    {
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)

_DEFAULT_BASE = 10_000.0
_MAX_ERROR = 1e-5  # of a frequency, relative; float32 factors are exact to 1e-7


def rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """For the config of a model with RoPE. Raises UnsupportedModel, naming the setting or the tensor."""
    settings = file.settings
    base = settings.get("rope.freq_base", _DEFAULT_BASE)
    if not base > 1:
        raise file.refusal("rope.freq_base", "it must be more than 1")
    parameters = {"rope_type": "default", "rope_theta": base} | _scaling(file)
    rotary_dim = settings.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        parameters["partial_rotary_factor"] = rotary_dim / head_dim
    factors = _factors(file, rotary_dim)
    if factors:
        if parameters["rope_type"] != "default":
            raise file.refusal("rope.scaling.type", f"it is not supported together with {ROPE_FACTORS}")
        parameters |= _llama3(file, factors, base)
    return parameters


def _scaling(file: GgufFile) -> dict[str, Any]:
    settings = file.settings
    kind = settings.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if settings.get("rope.scaling.factor") else "rope.scale_linear"
    factor = settings.get(key) or 1.0
    if settings.get("rope.scale_linear") not in (None, 0, factor):
        raise file.refusal("rope.scale_linear", f"{file.architecture}.rope.scaling.factor is {factor}")
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and factor == 1):
        raise file.refusal("rope.scaling.type", "only none, linear and yarn are supported")
    if settings.get("rope.scaling.yarn_ext_factor", -1) not in (-1, 1 if kind == "yarn" else 0):
        raise file.refusal("rope.scaling.yarn_ext_factor", "only the usual one of its type is supported")
    if kind == "none" or factor == 1:
        return {}
    if not factor > 1:
        raise file.refusal(key, "it must be 1 or more")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    return {"rope_type": "yarn", "factor": float(factor)} | _yarn_range(file)


def _yarn_range(file: GgufFile) -> dict[str, Any]:
    """Which frequencies yarn scales; that it also scales the scores by its factor is the same in transformers."""
    settings = file.settings
    original = settings.get("rope.scaling.original_context_length") or settings["context_length"]
    fast = settings.get("rope.scaling.yarn_beta_fast", 32.0)
    slow = settings.get("rope.scaling.yarn_beta_slow", 1.0)
    if not fast > slow > 0:
        raise file.refusal(
            "rope.scaling.yarn_beta_fast", f"it must be more than yarn_beta_slow ({slow}), and that than 0"
        )
    return {"original_max_position_embeddings": original, "beta_fast": float(fast), "beta_slow": float(slow)}


def _factors(file: GgufFile, rotary_dim: int) -> tuple[float, ...]:
    """By which each frequency is divided; empty if by nothing."""
    for name in (ROPE_FACTORS, *LONG_ROPE_FACTORS):
        if name not in file.shapes:
            continue
        factors = file.vectors.get(name, ())
        if len(factors) != rotary_dim // 2:
            raise file.tensor_refusal(
                name, f"it must have {rotary_dim // 2} numbers in float32, one for each pair of rotated dimensions"
            )
        if all(factor == 1 for factor in factors):
            continue
        if name in LONG_ROPE_FACTORS:
            raise file.tensor_refusal(name, "RoPE with other factors for long texts (longrope) is not supported")
        return factors
    return ()


def _llama3(file: GgufFile, factors: Sequence[float], base: float) -> dict[str, Any]:
    """The parameters of transformers' rope_type llama3 that give these factors.

    Whatever they were written as: what counts is that transformers computes these very frequencies from them.
    """
    for candidate in _llama3_candidates(factors, base):
        if _error(candidate | {"rope_theta": base}, factors) < _MAX_ERROR:
            return candidate
    raise file.tensor_refusal(
        ROPE_FACTORS, "these are not the factors of Llama 3.1's RoPE, and no others are supported"
    )


def _llama3_candidates(factors: Sequence[float], base: float) -> Iterator[dict[str, Any]]:
    """Those of Meta's models, then what the factors themselves say.

    Between two wavelengths 1/factor is linear in 1/wavelength: 1/factor = 1/largest + (1 - 1/largest) * smooth, with
    smooth = (original/wavelength - low) / (high - low). Only ratios of original, low and high matter, so low is 1.
    """
    largest = max(factors)
    if not largest > 1:
        return
    yield _llama3_of(largest, 4.0, 8_192)
    dim = 2 * len(factors)
    points = [
        (base ** (-2 * index / dim) / (2 * math.pi), (1 / factor - 1 / largest) / (1 - 1 / largest))
        for index, factor in enumerate(factors)
        if 1 < factor < largest * (1 - _MAX_ERROR)
    ]
    if len(points) < 2:
        return
    (first, first_smooth), (last, last_smooth) = points[0], points[-1]
    slope = (first_smooth - last_smooth) / (first - last)
    offset = first_smooth - slope * first
    if slope > 0 > offset:
        yield _llama3_of(largest, 1 - 1 / offset, round(-slope / offset))


def _llama3_of(factor: float, high: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _error(parameters: dict[str, Any], factors: Sequence[float]) -> float:
    """The largest relative difference of a frequency in transformers from the file's."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dim = 2 * len(factors)
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=dict(parameters))
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    expected = parameters["rope_theta"] ** -exponents / torch.tensor(factors, dtype=torch.float64)
    return float(((found.double() - expected) / expected).abs().max())
