"""Rotary embeddings without what updates their frequencies in a forward pass (transformers' `dynamic_rope_update`)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from replicas.position_reach import depends_on_step


class StaticRotary(nn.Module):
    """Stands in front of a rotary embedding and calls its forward method without the decorator that updates it.

    Only where no update would change anything, as `refuse_step_dependent` sees to: but some read the longest position
    back from the device, which a captured graph can't.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._angles = inspect.unwrap(type(rotary).forward)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._angles(self.rotary, *arguments, **named)


def static_rotary(module: nn.Module) -> StaticRotary | None:
    """For a rotary embedding whose kind updates its frequencies."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    forward = type(module).forward
    if inspect.unwrap(forward) is forward or not any(depends_on_step(str(kind)) for kind in kinds):
        return None
    return StaticRotary(module)
