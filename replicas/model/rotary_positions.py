"""Rotary positions that depend on the whole step: refused by name, or found by trying.

Some kinds choose or compute their frequencies by the longest position of a forward pass (transformers'
`dynamic_rope_update`). In a step of many requests a request's text would then depend on its neighbours. Where none of
those positions will be reached, such an embedding is made static (`replicas.layers.static_rotary`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from replicas.model.attention_trace import TRACED_POSITIONS
from replicas.model_support import UnsupportedModel

# Cosines and sines of one position differ by rounding alone, if at all.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class PositionCall:
    """One call of a module that was given positions. key: where they are, an index of arguments or a name."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    key: int | str


@contextmanager
def recorded_position_calls(model: nn.Module) -> Iterator[list[PositionCall]]:
    """Calls of modules without weights that are given TRACED_POSITIONS while this lasts, one a module."""
    calls: list[PositionCall] = []
    hooks = []
    for name, module in model.named_modules():
        if any(True for _ in module.parameters()):
            continue

        def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], name: str = name) -> None:
            given: list[tuple[int | str, Any]] = [*enumerate(arguments), *named.items()]
            for key, value in given:
                if _are_traced_positions(value):
                    calls.append(PositionCall(name, module, arguments, dict(named), key))
                    return

        hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def refuse_neighbours_in_positions(model_name: str, calls: list[PositionCall], max_model_len: int) -> None:
    """Raise UnsupportedModel where what a module makes of a position depends on the others of the same call.

    The net under `refuse_step_dependent`: each is computed without and with the farthest position that a step may
    have, and again afterwards, on copies on the CPU. Names the largest length at which nothing changes.
    """
    for call in calls:
        if max_model_len < 2 or _differs_beside(call, max_model_len - 1) is None:
            continue
        same, differs = 1, max_model_len - 1  # farthest positions
        while differs - same > 1:
            middle = (same + differs) // 2
            if _differs_beside(call, middle) is None:
                same = middle
            else:
                differs = middle
        position = _differs_beside(call, differs)
        raise UnsupportedModel(
            f"{model_name}: {call.name} ({type(call.module).__name__}) computes position {position} differently when "
            f"position {differs} is in the same step, so a text would depend on its neighbours; set "
            f"model.max_model_len to {differs} or less"
        )


def _differs_beside(call: PositionCall, farthest: int) -> int | None:
    """The first of some positions whose row changes beside the farthest, or after it; None when none does."""
    for position in sorted({0, 1, farthest // 3, farthest // 2, farthest - 1} - {farthest}):
        module = copy.deepcopy(call.module).cpu()
        alone, beside, after = (
            [rows[0] for rows in _rows(module, call, positions)]
            for positions in ([position], [position, farthest], [position])
        )
        for first, *others in zip(alone, beside, after, strict=True):
            if not all(torch.allclose(first, other, rtol=0.0, atol=_TOLERANCE) for other in others):
                return position
    return None


def _rows(module: nn.Module, call: PositionCall, positions: list[int]) -> list[torch.Tensor]:
    """What the module makes of them, each tensor with one row a position."""
    traced = call.arguments[call.key] if isinstance(call.key, int) else call.named[call.key]
    wanted = torch.tensor(positions).expand(*traced.shape[:-1], len(positions))
    arguments = [wanted if index == call.key else _on_host(value) for index, value in enumerate(call.arguments)]
    named = {name: wanted if name == call.key else _on_host(value) for name, value in call.named.items()}
    output = module(*arguments, **named)
    outputs = output if isinstance(output, tuple | list) else [output]
    rows = []
    for tensor in outputs:
        places = [d for d, size in enumerate(tensor.shape[:-1]) if size == len(positions)]
        if places:
            rows.append(tensor.movedim(places[-1], 0))
    return rows


def _on_host(value: Any) -> Any:
    """Numbers in float32, so that what comes out is exact enough to be compared."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.float().cpu() if value.is_floating_point() else value.cpu()


def _are_traced_positions(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return value.shape[-1:] == (len(TRACED_POSITIONS),) and value.flatten()[-3:].tolist() == list(TRACED_POSITIONS)
