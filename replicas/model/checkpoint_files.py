"""The files that transformers reads a folder's weights from, and the number types that they hold."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from replicas.model.checkpoint_mismatch import CheckpointMismatch, name_some

_INDEX = ".index.json"
_USUAL = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """In the order of transformers (5.24, `_get_resolved_checkpoint_files`): one file, else the shards that its index
    lists, wherever these lie. Empty if there are none. named: by config.json (`transformers_weights`).

    Raises CheckpointMismatch for a file beside an index of others: transformers takes the file, other programs the
    shards, so that one of them is a leftover, and nobody knows which; and for an index that can't be read.
    """
    for name in [named.removesuffix(_INDEX)] if named else _USUAL:
        whole, index = folder / name, folder / f"{name}{_INDEX}"
        shards = _shards(index) if index.is_file() else []
        if not whole.is_file() or (named or "").endswith(_INDEX):
            if shards:
                return shards
        elif set(shards) - {whole}:
            raise CheckpointMismatch(
                f"{folder} has two checkpoints, {whole.name} and the shards of {index.name}; delete the one that is "
                "not meant"
            )
        else:
            return [whole]
    return []


def number_types(files: list[Path]) -> dict[str, str]:
    """Of each tensor, by name. Reads headers only. Raises CheckpointMismatch for a name that several files have: which
    of them counts is up to their order.
    """
    of: dict[str, str] = {}
    twice: list[str] = []
    for file in files:
        kinds = _of_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file)
        twice += of.keys() & kinds.keys()
        of |= kinds
    if twice:
        raise CheckpointMismatch(f"several files of the checkpoint have {name_some(sorted(twice))}; delete leftovers")
    return of


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"{index} is no index of a checkpoint's files: {error!r}") from error


def _of_safetensors(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118  # it is no mapping


def _of_pickle(file: Path) -> dict[str, str]:
    tensors = torch.load(file, map_location="meta", weights_only=True)
    return {name: _NAMES.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()}


_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
