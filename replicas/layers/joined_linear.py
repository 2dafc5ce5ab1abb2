"""Projections of one input, computed as one matrix product: q, k, v of an attention; gate and up of an MLP.

The model's own code goes on calling its three (or two) modules: the first one that meets an input computes all of
them, the others take their part of the result. So nothing here depends on the architecture, and the weights lie in
memory once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from replicas.layers.linear import LinearLayer, join_linear_layers
from replicas.layers.place import Change, Place


@dataclass(slots=True)
class _Held:
    """Of the last product: its input, so that no other tensor can be taken for it, and the parts not taken yet, by
    index. Replaced as one, so that a thread never takes another's parts.

    Not an attribute of the module: to set one of those costs as much as a small kernel.
    """

    last: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None


class JoinedLinear(nn.Module):
    """Several linear layers of one input. Any thread: of two at once (both lanes on a CPU) each gets its own parts, and
    may compute a product twice.

    linear: all of them as one, in whatever way that computes its product. sizes: the parts' out_features.
    """

    def __init__(self, linear: LinearLayer, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self.sizes = list(sizes)
        self._held = _Held()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """All parts of x, [..., sum of sizes]."""
        out: torch.Tensor = self.linear(x)
        return out

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Part `index` of the product with x, [..., sizes[index]]: a view of it, not contiguous."""
        last = self._held.last
        if last is None or x is not last[0] or index not in last[1]:
            last = x, dict(enumerate(self.product(x).split(self.sizes, dim=-1)))
            self._held.last = last
        waiting = last[1]
        output = waiting.pop(index)
        if not waiting:
            self._held.last = None
        return output


class ProjectionPart(nn.Module):
    """Stands where the model expects one of the linear layers. joined is shared with the other parts."""

    def __init__(self, joined: JoinedLinear, index: int) -> None:
        super().__init__()
        self.joined = joined
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], a view."""
        return self.joined.part(self.index, x)


def joined_projections(model: nn.Module, names: Sequence[str]) -> Iterator[Change]:
    """Parts of one product for the layers of these names, wherever a module has all of them.

    Results may differ from the unjoined in the last bits, as always when a matrix product changes its shape. Each
    change needs memory for the layers it joins, until it is made.
    """
    owners = [module for module in model.modules() if all(name in module._modules for name in names)]
    for owner in owners:
        modules = [owner._modules[name] for name in names]
        if any(module is None or isinstance(module, ProjectionPart) for module in modules):
            continue
        linear = join_linear_layers(modules)
        if linear is None:
            yield {}
            continue
        joined = JoinedLinear(linear, [int(module.out_features) for module in modules])  # type: ignore[union-attr, arg-type]
        yield {Place(owner, name): ProjectionPart(joined, index) for index, name in enumerate(names)}
