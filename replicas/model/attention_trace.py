"""What a model really hands to attention, seen in one short forward pass: its configuration only has names for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from replicas.layers.attention_seam import UnsupportedAttention, refuse_arguments, use_attention
from replicas.model_support import UnsupportedModel

_TRACED_NAME = "splitserve_traced"
TRACED_POSITIONS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Equal in all layers. Keys and values are [1, num_kv_heads, num_tokens, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int
    num_heads: int
    key: tuple[int, int]  # heads, head_dim
    value: tuple[int, int]


@torch.inference_mode()
def trace_attention(model: Any, num_layers: int) -> AttentionShape:
    """Run a few tokens through the loaded model, whose attention may be any; it is as before afterwards.

    num_layers: that the configuration names. Raises UnsupportedModel when attention is not called once by each layer,
    or with shapes that our pool does not hold.
    """
    calls: list[_Call] = []
    input_ids = torch.tensor(TRACED_POSITIONS[::-1], device=model.device)
    positions = torch.tensor(TRACED_POSITIONS, device=model.device)
    with _traced_attention(model):
        model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, paged=calls)
    name = type(model).__name__
    layers = [call.layer for call in calls]
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: attention is called {len(calls)} times, by {len(set(layers))} layers; each of its {num_layers} "
            "layers must call it once"
        )
    shapes = {call.key for call in calls}
    if len(shapes) > 1:
        raise UnsupportedModel(f"{name}: keys of {_listed(shapes)} (heads x dimension) in unlike layers, one is served")
    for call in calls:
        if call.key != call.value:
            raise UnsupportedModel(f"{name}: keys of {_listed([call.key])}, values of {_listed([call.value])}")
        if call.num_heads % call.key[0]:
            raise UnsupportedModel(f"{name}: {call.num_heads} query heads do not share {call.key[0]} KV heads evenly")
    return AttentionShape(num_layers, *calls[0].key)


@contextmanager
def _traced_attention(model: Any) -> Iterator[None]:
    """Another attention while this lasts. Mutates the model, and puts it back."""
    before = model.config._attn_implementation
    use_attention(model, _TRACED_NAME, _record)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged: list[_Call] | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """An attention function that attends to nothing. Returns zeros [1, num_tokens, num_heads, head_dim]."""
    kind = type(module).__name__
    if paged is None:
        raise UnsupportedAttention(f"{kind} is not handed what the paged attention needs: arguments are not passed on")
    if not hasattr(module, "layer_idx"):
        raise UnsupportedAttention(f"{kind} does not say which layer it is (layer_idx)")
    refuse_arguments(module, attention_mask, arguments)
    paged.append(
        _Call(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            num_heads=query.shape[1],
            key=(key.shape[1], key.shape[3]),
            value=(value.shape[1], value.shape[3]),
        )
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _listed(shapes: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{heads} x {head_dim}" for heads, head_dim in sorted(shapes))
