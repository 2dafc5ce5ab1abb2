"""Scales of 8-bit KV that come with a checkpoint: of the keys and the values of each layer, measured by who made it.

As compressed-tensors, ModelOpt and AutoFP8 name them; what is stored is a key divided by its layer's scale.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from replicas.model.checkpoint_files import weight_files
from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some
from replicas.stored_numbers import is_scale

# kv_scale: one for both. output_scale: of compressed-tensors before 0.6, of what the projections give.
KV_SCALE_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\.(?:(?P<key>(?:k_proj\.|attn\.)?k_scale|k_proj\.output_scale)"
    r"|(?P<value>(?:v_proj\.|attn\.)?v_scale|v_proj\.output_scale)|(?:attn\.)?kv_scale)$"
)

logger = logging.getLogger(__name__)


def read_kv_scales(
    folder: Path, num_layers: int, named: str | None = None, *, are_all_there: bool = False
) -> tuple[tuple[float, float], ...]:
    """(of keys, of values) of each layer; empty where the checkpoint has none. A layer that it leaves out has 1.0, and
    a log line. folder, named: as of `weight_files`. are_all_there: the config says so. Reads files.

    Raises CheckpointMismatch for what is no positive number, for scales of heads, for layers that there are not, for
    two that are unlike, and for one that is not there though the config says so.
    """
    found: dict[tuple[int, str], float] = {}
    for name, tensor in _scale_tensors(weight_files(folder, named)):
        match = KV_SCALE_NAME.search(name)
        assert match is not None, "it was found by its name"
        layer = int(match["layer"])
        if tensor.numel() != 1:
            raise CheckpointMismatch(f"{name} has {tensor.numel()} numbers: KV is stored with one scale for a layer")
        scale = float(tensor.float())
        if layer >= num_layers or not is_scale(scale):
            raise CheckpointMismatch(f"{name} = {scale:g} is no scale of a layer of {num_layers}")
        for kind in ("key", "value"):
            is_of_it = match[kind] or not (match["key"] or match["value"])
            if is_of_it and found.setdefault((layer, kind), scale) != scale:
                raise CheckpointMismatch(f"layer {layer}'s {kind}s have two unlike scales, one of them {name}")
    if not found and not are_all_there:
        return ()
    places = [(layer, kind) for layer in range(num_layers) for kind in ("key", "value")]
    if lacking := [f"layer {layer}'s {kind}s" for layer, kind in places if (layer, kind) not in found]:
        if are_all_there:
            raise CheckpointMismatch(
                f"the checkpoint has a kv_cache_scheme in its config.json, but no k_scale or v_scale of "
                f"{name_some(lacking)}; set kv.dtype: auto, by which no scales are needed"
            )
        extra = {"event": "kv_scales_lacking", "num_lacking": len(lacking)}
        logger.warning("no scale of KV in the checkpoint, so 1.0: %s", name_some(lacking), extra=extra)
    return tuple((found.get((layer, "key"), 1.0), found.get((layer, "value"), 1.0)) for layer in range(num_layers))


def _scale_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    if KV_SCALE_NAME.search(name):
                        yield name, opened.get_tensor(name)
        else:
            tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            yield from ((name, tensor) for name, tensor in tensors.items() if KV_SCALE_NAME.search(name))
