"""What some layers of a model are given, kept while it runs: also where layers are compiled, and in captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from replicas.model_support import UnsupportedModel


class TappedLayer(nn.Module):
    """Stands where a model has a layer, does what it does, and keeps what goes in, or comes out."""

    def __init__(self, layer: nn.Module, seen: dict[int, torch.Tensor], before: int | None, behind: int | None) -> None:
        """before, behind: the numbers by which what goes in, and comes out, is kept in `seen`; None: it is not."""
        super().__init__()
        self.layer = layer
        self._seen, self._before, self._behind = seen, before, behind

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self._before is not None:
            self._seen[self._before] = (arguments[0] if arguments else named["hidden_states"])[0]
        output = self.layer(*arguments, **named)
        if self._behind is not None:
            self._seen[self._behind] = (output[0] if isinstance(output, tuple) else output)[0]
        return output

    def __getattr__(self, name: str) -> Any:
        """What transformers asks its layers for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class LayerTaps:
    """Of one model, from then on. One thread."""

    def __init__(self, model: nn.Module, num_layers: int, layer_ids: Sequence[int]) -> None:
        """layer_ids: as of `LayerInputs`. Mutates the model. Raises UnsupportedModel for one without a list of so many
        layers."""
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
        if not lists:
            raise UnsupportedModel(
                f"{type(model).__name__} has no list of {num_layers} layers: no head can look into it"
            )
        self._seen: dict[int, torch.Tensor] = {}
        self._layer_ids = tuple(layer_ids)
        wanted, last = set(layer_ids), num_layers - 1
        for index in sorted({min(id_, last) for id_ in wanted}):
            before = index if index in wanted else None
            behind = num_layers if index == last and num_layers in wanted else None
            lists[0][index] = TappedLayer(lists[0][index], self._seen, before, behind)

    def take(self) -> torch.Tensor:
        """Of the tokens of the last pass, [n, layers * hidden size]. Mutates: nothing is kept any longer."""
        states = torch.cat([self._seen[id_] for id_ in self._layer_ids], dim=-1)
        self._seen.clear()
        return states
