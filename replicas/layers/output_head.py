"""The output head on a CPU: the widest product of a step, and at few rows bound by how its weights lie in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from replicas.layers.linear import PlainLinear, plain_linear
from replicas.layers.place import Change, all_places

# With more rows one product is faster than one for each.
_MOST_ROWS_APART = 4
# Outputs at once when there are more rows: what the product rearranges of the weights then stays in the cache.
_OUTPUTS_AT_ONCE = 1024


class WideLinear(PlainLinear):
    """A linear layer of many outputs: a few rows one at a time, more of them some outputs at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        if len(rows) <= 1:
            return F.linear(x, self.weight, self.bias)
        if len(rows) <= _MOST_ROWS_APART:
            outputs = torch.cat([F.linear(row, self.weight, self.bias) for row in rows.split(1)])
        else:
            bias: torch.Tensor | None = self.bias
            weights = self.weight.split(_OUTPUTS_AT_ONCE)
            biases = [None] * len(weights) if bias is None else bias.split(_OUTPUTS_AT_ONCE)
            outputs = torch.cat([F.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)
        return outputs.view(*x.shape[:-1], -1)


def wide_heads(model: nn.Module) -> Iterator[Change]:
    """A WideLinear for a plain output head with more outputs than inputs, whose weights are put in column order.

    Embeddings tied to the head stay tied: the same memory, in the other order (a prompt's lookup takes a hundredth of
    its prefill then). Needs memory for a second head while it runs. Mutates the weights' order.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    plain = plain_linear(head)
    if plain is None or plain.out_features <= plain.in_features:
        return
    plain.weight.data = plain.weight.data.t().contiguous().t()
    wide = WideLinear(plain.weight, plain.bias)
    yield {place: wide for places in all_places(model) for place in places if place.layer is head}
