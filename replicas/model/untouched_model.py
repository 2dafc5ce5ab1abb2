"""All that is looked at on a loaded model before it is changed to be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replicas.layers.replaced_layers import before_first_look, replace_layers
from replicas.model.attention_trace import AttentionShape, trace_attention
from replicas.model.reference_logits import CheckedPrompt, compute_reference
from replicas.model.rotary_positions import recorded_position_calls, refuse_neighbours_in_positions
from replicas.model.rounding_cache import KvRounding
from replicas.model_support import UnsupportedModel
from replicas.position_reach import original_length


@dataclass(frozen=True, slots=True)
class Examined:
    """attention: what the pool must hold. reference: what `self_check` compares with."""

    attention: AttentionShape
    reference: tuple[CheckedPrompt, ...]


def examine(model: Any, max_model_len: int, rounding: KvRounding | None = None) -> Examined:
    """Look at the model; once transformers alone has computed with it, its rotary positions are made static: the one
    thing that is mutated. rounding: as of `compute_reference`. Blocks for less than a second. Raises UnsupportedModel.
    """
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not let its attention be replaced")
    config = model.config
    reference = compute_reference(model, max_model_len, original_length(config), rounding)
    replace_layers(model, before_first_look())
    with recorded_position_calls(model) as calls:
        attention = trace_attention(model, config.num_hidden_layers)
    refuse_neighbours_in_positions(name, calls, max_model_len)
    return Examined(attention, reference)
