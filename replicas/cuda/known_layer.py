"""Decoder layers of transformers that are known to the letter, once their linear layers are joined and their attention
is ours: what stands for one need not call its parts one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from replicas.layers.joined_attention import JoinedAttention
from replicas.layers.joined_linear import ProjectionPart

# Of transformers: their forward passes are the same to the letter, and those of their norms and MLPs.
_KNOWN = ("Llama", "Mistral", "Qwen2", "Qwen3")
_NAMES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class KnownLayer(nn.Module):
    """Stands where a model has a decoder layer that `linears_of` knows, with the same parts under the same names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, part in layer.named_children():
            self.add_module(name, part)


@dataclass(frozen=True, slots=True)
class LayerLinears:
    """What computes a known layer's products, but for the one behind attention. None: there is no one for all of it."""

    qkv: nn.Module | None
    gate_up: nn.Module | None
    down: nn.Module | None


def linears_of(module: nn.Module) -> LayerLinears | None:
    """None for a module that is no such layer, and where a hook looks at something that there might be no more."""
    parts = [getattr(module, name, None) for name in _NAMES]
    if not _is_of_known(module, "DecoderLayer") or not isinstance(parts[1], JoinedAttention):
        return None
    norms, mlp = (parts[0], parts[2]), parts[3]
    if not all(_is_of_known(norm, "RMSNorm") for norm in norms) or not _is_of_known(mlp, "MLP"):
        return None
    if type(getattr(mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    if any(map(_is_watched, module.modules())):
        return None
    qkv = _joined(parts[1], "q_proj", "k_proj", "v_proj")
    return LayerLinears(qkv, _joined(mlp, "gate_proj", "up_proj"), getattr(mlp, "down_proj", None))


def _is_of_known(module: Any, kind: str) -> bool:
    made_of = type(module)
    is_named = made_of.__name__ in [known + kind for known in _KNOWN]
    return is_named and made_of.__module__.startswith("transformers.models.")


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _joined(module: Any, *names: str) -> nn.Module | None:
    """What stands for all of these layers, in this order."""
    parts = [getattr(module, name, None) for name in names]
    of_one = [part.joined for part in parts if isinstance(part, ProjectionPart) and part.index == parts.index(part)]
    if len(of_one) < len(parts) or any(joined is not of_one[0] for joined in of_one):
        return None
    return of_one[0].linear
