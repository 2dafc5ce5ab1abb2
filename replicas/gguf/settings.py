"""Settings of a GGUF file that no transformers config is made from: each is known not to matter, or it is refused.

A setting that we know nothing of may be one more scale or mask: leaving it out would give fluent wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from replicas.gguf.architecture import GgufArchitecture
from replicas.gguf.file import GgufFile

_MUST_BE_UNSET = {
    "attention.sliding_window_pattern": "sliding-window attention is not supported",
    "attention.shared_kv_layers": "layers that share keys and values are not supported",
    "attention.clamp_kqv": "clamped queries, keys and values are not supported",
    "attention.max_alibi_bias": "attention position biases (ALiBi) are not supported",
    "attention.temperature_scale": "a temperature that grows with the position is not supported",
    "attn_logit_softcapping": "attention soft-capping is not supported",
    "final_logit_softcapping": "soft-capping of logits is not supported",
    "router_logit_softcapping": "soft-capping of logits is not supported",
    "expert_shared_count": "shared experts are not supported",
    "leading_dense_block_count": "layers that are not all alike are not supported",
    "nextn_predict_layers": "layers that predict further tokens are not supported",
    "pooling_type": "this is a model for embeddings, not for text",
    "use_parallel_residual": "parallel residuals are not supported",
    "rope.scaling.alpha": "this RoPE scaling is not supported",
    "rope.scaling.yarn_log_multiplier": "this RoPE scaling is not supported",
    "rope.dimension_sections": "multi-axis RoPE is not supported",
}

_MUST_BE_ONE = {
    "logit_scale": "a scale of logits is not supported",
    "embedding_scale": "a scale of embeddings is not supported",
    "residual_scale": "a scale of residuals is not supported",
    "attention.output_scale": "a scale of attention's output is not supported",
    "expert_weights_scale": "a scale of experts' weights is not supported",
    "expert_gating_func": "only softmax chooses experts",
    "expert_group_count": "groups of experts are not supported",
    "expert_group_used_count": "groups of experts are not supported",
    "moe_every_n_layers": "layers that are not all alike are not supported",
    "interleave_moe_layer_step": "layers that are not all alike are not supported",
    "rope.scaling.attn_factor": "its meaning depends on who wrote the file",
    "rope.scaling.yarn_attn_factor": "its meaning depends on who wrote the file",
}

# What is the same whatever it says.
_NO_MATTER = {"rope.scaling.finetuned"}


def check_settings(file: GgufFile, architecture: GgufArchitecture, head_dim: int, applied: set[str]) -> None:
    """Raise UnsupportedModel for the first setting that is neither applied nor without effect.

    applied: settings that the config is made from.
    """
    settings = file.settings
    for key in sorted(settings.keys() - applied - _NO_MATTER):
        value = settings[key]
        if key in _MUST_BE_UNSET:
            reason = "" if _is_unset(value) else _MUST_BE_UNSET[key]
        elif key in _MUST_BE_ONE:
            reason = "" if _is_unset(value) or value == 1 else _MUST_BE_ONE[key]
        elif key in _CONDITIONS:
            reason = _CONDITIONS[key](value, file, architecture, head_dim)
        else:
            reason = "it is not known here, and may change the text"
        if reason:
            raise file.refusal(key, reason)


def _is_unset(value: Any) -> bool:
    """llama.cpp writes 0 where a number has not been set; an array has a number for each layer."""
    return not any(value) if isinstance(value, list) else not value


def _sliding_window(window: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    """A window that holds the longest text hides nothing."""
    longest = file.settings["context_length"]
    return "" if _is_unset(window) or window >= longest else "sliding-window attention is not supported"


def _attention_scale(scale: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    usual = 1 / math.sqrt(head_dim)
    is_usual = _is_unset(scale) or math.isclose(scale, usual, rel_tol=1e-5)
    return "" if is_usual else f"only the usual scale of attention scores is supported ({usual:.6g})"


def _value_length(length: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    return "" if length == head_dim else f"values and keys ({head_dim}) must be equally long"


def _causal(value: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    return "" if value is True else "only causal attention is supported"


def _same_as(key: str) -> Callable[[Any, GgufFile, GgufArchitecture, int], str]:
    def check(value: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
        other = file.settings[key]
        return "" if _is_unset(value) or value == other else f"it must be as {file.architecture}.{key} ({other})"

    return check


def _experts(value: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    """Of an architecture whose experts are not in its attributes: it has none here."""
    return "" if _is_unset(value) else "experts are not supported in this architecture"


def _experts_normed(value: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    if bool(value) == architecture.is_expert_normed or file.settings.get("expert_count", 0) == 0:
        return ""
    return f"the experts of {file.architecture} are weighed otherwise"


def _layout(value: Any, file: GgufFile, architecture: GgufArchitecture, head_dim: int) -> str:
    """The order of queries' and keys' rows: transformers' reader takes that of llama to be as in Meta's own files."""
    expected = "Meta AI original pth" if file.architecture == "llama" else "reference"
    return "" if value == expected else f"only {expected!r} is supported"


_CONDITIONS: dict[str, Callable[[Any, GgufFile, GgufArchitecture, int], str]] = {
    "attention.sliding_window": _sliding_window,
    "attention.scale": _attention_scale,
    "attention.key_length": _value_length,
    "attention.value_length": _value_length,
    "attention.causal": _causal,
    "attention.head_count_kv": _same_as("attention.head_count"),
    "embedding_length_out": _same_as("embedding_length"),
    "expert_count": _experts,
    "expert_used_count": _experts,
    "expert_feed_forward_length": _experts,
    "expert_shared_feed_forward_length": _experts,
    "expert_weights_norm": _experts_normed,
    "tensor_data_layout": _layout,
}
