"""Operators that a compiled layer calls as they are: what is inside stays out of the compiler's sight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema

# An operator lives as long as its library does: for as long as the process. Not `torch.library.custom_op`: a
# call of one takes twice as long, and a step launched by hand makes five calls a layer.
_LIBRARY = Library("splitserve", "FRAGMENT")


Result = torch.Tensor | tuple[torch.Tensor, ...]


def operator(function: Callable[..., Result], shape: Callable[..., Result]) -> Any:
    """Register `function` by its name and return what is to be called: the same, but opaque. Once for each name.

    function: annotated tensors and numbers to a tensor, or some, that share no memory with them; what it mutates beyond
    is not declared. shape: the same arguments to empty tensors like the result.
    """
    name = function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"splitserve::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.splitserve, name).default
