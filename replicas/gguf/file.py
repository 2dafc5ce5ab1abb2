"""What a GGUF file says: its metadata and what tensors it holds. Nothing of the weights is read yet."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.gguf.header import GgufHeader, NotGguf, OtherByteOrder, opened_gguf
from replicas.model_support import UnsupportedModel

# Longer arrays are no settings.
_LONGEST_ARRAY = 4_096
_TOKENS, _TOKEN_TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """architecture: as llama.cpp names it. metadata: by key; arrays that are too long for a setting are left out, and
    left_out has their keys. tokens, token_types, merges: of its vocabulary; empty where it has none. shapes: of each
    tensor by name, rows first as in torch. vectors: the values of the tensors that scale positions.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    left_out: frozenset[str]
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, tuple[float, ...]]

    @property
    def settings(self) -> dict[str, Any]:
        """The metadata of this architecture, without its name in front: what a model's shape and arithmetic are."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def refusal(self, key: str, reason: str) -> UnsupportedModel:
        """For the caller to raise. key: of the settings."""
        name = f"{self.architecture}.{key}"
        return UnsupportedModel(f"{self.path}: {name} is {self.metadata.get(name, 'missing')!r}: {reason}")

    def tensor_refusal(self, name: str, reason: str) -> UnsupportedModel:
        """For the caller to raise."""
        return UnsupportedModel(f"{self.path}: the tensor {name} {list(self.shapes[name])}: {reason}")


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises OSError, and UnsupportedModel for what is no whole
    GGUF file of one model in the byte order of this machine.
    """
    try:
        with opened_gguf(path) as (header, view):
            metadata = {key: _one(value) for key, value in header.metadata.items() if not _is_long(value)}
            tokens, token_types, merges = (_array(header, key) for key in (_TOKENS, _TOKEN_TYPES, _MERGES))
            vectors = {
                name: struct.unpack_from(f"<{math.prod(tensor.shape)}f", view, tensor.offset)
                for name, tensor in header.tensors.items()
                if name.startswith("rope_") and tensor.kind == "F32"
            }
    except NotGguf as error:
        raise UnsupportedModel(f"{path} is no GGUF file ({error}): is it the right one, and is it whole?") from error
    except OtherByteOrder as error:
        raise UnsupportedModel(f"{path} has the byte order of another kind of machine") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"{path} is not a whole GGUF file ({error}): perhaps a download that was cut short"
        ) from error
    left_out = frozenset(header.metadata.keys() - metadata.keys())
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UnsupportedModel(f"{path}: general.architecture is missing")
    _check_one_model(path, metadata)
    return GgufFile(path, architecture, metadata, left_out, tokens, token_types, merges, shapes, vectors)


def _one(value: Any) -> Any:
    """Of one metadata field; an array of one is that one, as in transformers."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > _LONGEST_ARRAY


def _array(header: GgufHeader, key: str) -> tuple[Any, ...]:
    value = header.metadata.get(key, ())
    return tuple(value) if isinstance(value, list) else (value,) if value != () else ()


def _check_one_model(path: Path, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{path}: general.type is {kind!r}; only a whole model can be served")
    num_parts = metadata.get("split.count", 1)
    if num_parts > 1:
        raise UnsupportedModel(
            f"{path}: split.count is {num_parts}: this is one of {num_parts} parts; make one file of them with "
            "llama-gguf-split --merge"
        )
