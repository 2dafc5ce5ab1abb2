"""A checkpoint that is not what its config says, or is not whole: refused, naming keys."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.model_support import UnsupportedModel

_MOST_NAMES = 6


class CheckpointMismatch(UnsupportedModel):
    """Serving these files would give wrong text; the message names what is wrong with them."""


def name_some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    some = ", ".join(names[:_MOST_NAMES])
    return some if len(names) <= _MOST_NAMES else f"{some} and {len(names) - _MOST_NAMES} more"
