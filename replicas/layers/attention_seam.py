"""The seam that transformers has for attention: a function by name, which each layer calls with its q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

# Arguments that do not change what attention computes. Any other may (a window, sinks, soft-capping, a bias): a model
# that passes one is refused.
_HARMLESS_ARGUMENTS = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_ids", "return_dict", "use_cache"}
)  # fmt: skip


class UnsupportedAttention(Exception):
    """The model asks for a kind of attention that this does not compute; serving it would give wrong text."""


def use_attention(model: Any, name: str, function: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Have all layers of the model call this function, known to transformers by this name. Mutates its config."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)


def refuse_arguments(module: nn.Module, attention_mask: torch.Tensor | None, arguments: dict[str, object]) -> None:
    """Raise UnsupportedAttention when the model passes one that we do not know to be without effect.

    transformers makes no mask for an attention that it does not know, so a mask is one that the model made itself.
    """
    if attention_mask is not None:
        raise UnsupportedAttention(f"layer {module.layer_idx} makes an attention mask of its own")
    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        raise UnsupportedAttention(f"layer {module.layer_idx} attends to later tokens too")
    for name, value in arguments.items():
        if value is not None and name not in _HARMLESS_ARGUMENTS:
            raise UnsupportedAttention(f"layer {module.layer_idx} wants {name}={value}")
