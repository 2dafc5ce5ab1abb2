"""A model's layers, each compiled for itself and for any number of tokens."""

from __future__ import annotations

import logging

import torch

from replicas.cuda.layer_taps import TappedLayer
from replicas.kernels.dependent_launch import launches_early

logger = logging.getLogger(__name__)


def compile_decoder_layers(model: torch.nn.Module, num_layers: int, device: torch.device) -> None:
    """From their next call on; that one takes seconds. Mutates."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for layer in _decoder_layers(model, num_layers):
        inner = layer.layer if isinstance(layer, TappedLayer) else layer
        inner.compile(dynamic=True, options=_compiler_options(device))


def _compiler_options(device: torch.device) -> dict[str, bool]:
    """The compiler's kernels are launched early, too: without theirs, ours gain nothing by it. And it may not choose
    tiles by how fast they were for the few tokens of the first call: for many, that choice can cost half of the rate.
    """
    options = {"triton.enable_pdl": launches_early(device), "triton.autotune_pointwise": False}
    known = torch._inductor.list_options()
    return {name: value for name, value in options.items() if name in known}


def _decoder_layers(model: torch.nn.Module, num_layers: int) -> list[torch.nn.Module]:
    """The model's layers: the one list of modules that is as long as there are layers. Empty if there is none."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    logger.warning("no list of layers found: nothing is compiled", extra={"event": "not_compiled"})
    return []
