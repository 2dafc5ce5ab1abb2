"""Where layers stand in their model, and how others come to stand there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer stands: `owner.name`. Does not hold the layer, whose memory is free once another is there."""

    owner: nn.Module
    name: str

    @property
    def layer(self) -> nn.Module:
        layer: nn.Module = getattr(self.owner, self.name)
        return layer

    def put(self, layer: nn.Module) -> None:
        """Have this layer stand here, in the mode of the one before. Mutates the owner."""
        setattr(self.owner, self.name, layer.train(self.layer.training))


# Layers that come to stand in a model at once, by their places. Empty: some that ought to be replaced can't be.
Change = dict[Place, nn.Module]


def all_places(model: nn.Module) -> list[tuple[Place, ...]]:
    """Each layer's, once: more than one of a layer that its model shares, as what comes there must be shared too."""
    by_layer: dict[int, list[Place]] = {}
    for owner in model.modules():
        for name, layer in owner._modules.items():
            if layer is not None:
                by_layer.setdefault(id(layer), []).append(Place(owner, name))
    return [tuple(places) for places in by_layer.values()]


def each_layer(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> Iterator[Change]:
    """What `make` gives for each layer, where it gives any. A change must be made before the next is asked for."""
    for places in all_places(model):
        layer = make(places[0].layer)
        if layer is not None:
            yield dict.fromkeys(places, layer)
