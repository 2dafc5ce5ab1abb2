"""All that is replaced in a model of transformers, where, and by what. Architectures and weights stay theirs.

    when                      where        which layers                              come to be
    before its first look     everywhere   rotary embeddings that look at a step     StaticRotary
    before it is served       everywhere   q, k, v; gate, up                         ProjectionPart of a JoinedLinear
                              on a CPU     a plain output head                       WideLinear
    with a pool, on a card    on a card    attention that is known to the letter     the card's JoinedAttention
                              on a card    plain and quantised linear layers,        the card's linear layer
                                           joined ones too
                              on a card    decoder layers that are known to the      the card's RoundedLayer, or
                                           letter: of 8-bit products, or others      its GatedLayer

A layer is put where the other stood, with the same tensors: no class, method or hook of a layer is changed. What
attends over the pool is no layer: transformers asks for a function by name (`attention_seam`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from replicas.layers.joined_attention import JoinedAttention, is_known
from replicas.layers.joined_linear import joined_projections
from replicas.layers.linear import LinearLayer
from replicas.layers.output_head import wide_heads
from replicas.layers.place import Change, each_layer
from replicas.layers.static_rotary import static_rotary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One row of the table. name: of what is put in, in the log. find: the changes, one after the other.

    is_usual: most models have such layers; where none has any, somebody should know.
    """

    name: str
    find: Callable[[nn.Module], Iterator[Change]]
    is_usual: bool = True


@dataclass(frozen=True, slots=True)
class ReplacedLayers:
    """How many changes were made, and how many could not be, by the names of the table's rows."""

    made: dict[str, int]
    left_alone: dict[str, int]


def before_first_look() -> tuple[Replacement, ...]:
    """Once `compute_reference` has seen the model as it is."""
    return (Replacement("static_rotary", partial(each_layer, make=static_rotary), is_usual=False),)


def before_serving(device: torch.device) -> tuple[Replacement, ...]:
    """For a model on this device, in this order."""
    joined = (
        Replacement("joined_q_k_v", partial(joined_projections, names=("q_proj", "k_proj", "v_proj"))),
        Replacement("joined_gate_up", partial(joined_projections, names=("gate_proj", "up_proj"))),
    )
    return (*joined, Replacement("wide_head", wide_heads, is_usual=False)) if device.type == "cpu" else joined


def with_card_kernels(
    attention: Callable[[nn.Module], JoinedAttention],
    linear: Callable[[nn.Module], LinearLayer | None],
    layer: Callable[[nn.Module], nn.Module | None],
) -> tuple[Replacement, ...]:
    """After `before_serving`, in this order: attention is known by its joined projections, a layer by its parts.

    attention: makes the card's of a known one. linear, layer: the card's of what it has one for, else None.
    """

    def known(module: nn.Module) -> JoinedAttention | None:
        return attention(module) if is_known(module) else None

    return (
        Replacement("card_attention", partial(each_layer, make=known)),
        Replacement("card_linear", partial(each_layer, make=linear)),
        Replacement("card_layer", partial(each_layer, make=layer), is_usual=False),
    )


def replace_layers(model: nn.Module, table: Sequence[Replacement]) -> ReplacedLayers:
    """Put in what the table says, row by row, and log how much that was. Doing it again changes nothing more.

    Mutates the model. Needs memory for one change at a time.
    """
    replaced = ReplacedLayers({row.name: 0 for row in table}, {row.name: 0 for row in table})
    for row in table:
        for change in row.find(model):
            counts = replaced.made if change else replaced.left_alone
            counts[row.name] += 1
            for place, layer in change.items():
                place.put(layer)
    usual = [replaced.made[row.name] for row in table if row.is_usual]
    log = logger.warning if any(replaced.left_alone.values()) or (usual and not any(usual)) else logger.info
    log(
        "layers replaced",
        extra={"event": "layers_replaced", "made": replaced.made, "left_alone": replaced.left_alone},
    )
    return replaced
