"""The header of a GGUF file, read by ourselves: gguf's reader makes three objects of every token of a vocabulary, which
takes 14 s for a vocabulary of 128,000; this takes a fifth of a second. The format: gguf.md of ggml's docs.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT_KEY, _USUAL_ALIGNMENT = "general.alignment", 32
# More are no file of a model; each takes at least so many bytes, so a header that lies is found before it is believed.
_MOST_DIMENSIONS = 8


class BadHeader(ValueError):
    """No whole GGUF file; the message says what of it is wrong."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape: rows first, as in torch. kind: the name that ggml has for its numbers."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: by key; an array is a list. Both in the order of the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


class NotGguf(BadHeader):
    """It does not even begin as one."""


class OtherByteOrder(BadHeader):
    """Of another kind of machine."""


@contextmanager
def opened_gguf(path: Path) -> Iterator[tuple[GgufHeader, memoryview]]:
    """The header, and the bytes of the file, valid within. Raises OSError; BadHeader for what is no whole file."""
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
        if len(begin) < len(_MAGIC):
            raise BadHeader(f"it has {len(begin)} bytes")
        if begin != _MAGIC:
            raise NotGguf("it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            yield _read(view), view


def _read(view: memoryview) -> GgufHeader:
    reader = _Reader(view)
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise OtherByteOrder("its numbers have the other byte order")
    if version not in _VERSIONS:
        raise BadHeader(f"version {version}, known are {_VERSIONS[0]} and {_VERSIONS[-1]}")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text()
        if key in metadata:
            raise BadHeader(f"{key} is given twice")
        metadata[key] = reader.value(reader.number("I"))
    found = [_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT_KEY, _USUAL_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise BadHeader(f"{_ALIGNMENT_KEY} is {alignment!r}")
    start = -(-reader.place // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset, num_bytes in found:
        if name in tensors:
            raise BadHeader(f"two tensors are named {name}")
        if start + offset + num_bytes > len(view):
            raise BadHeader(f"it ends before the tensor {name} does")
        tensors[name] = StoredTensor(shape, kind, start + offset, num_bytes)
    return GgufHeader(metadata, tensors)


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, kind, offset from where the tensors begin, bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, num_dimensions = reader.text(), reader.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise BadHeader(f"the tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([reader.number("Q") for _ in range(num_dimensions)]))
    kind = GGMLQuantizationType(reader.number("I"))
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return name, shape, kind.name, reader.number("Q"), math.prod(shape) * block_bytes // block_size


class _Reader:
    """Reads one value behind the other. Raises BadHeader at the end of the file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.place = len(_MAGIC)
        self._readers: dict[str, Callable[..., tuple[Any, ...]]] = {
            kind: struct.Struct(f"<{kind}").unpack_from for kind in _NUMBERS.values()
        }

    def number(self, kind: str) -> Any:
        try:
            (value,) = self._readers[kind](self._view, self.place)
        except struct.error:
            raise BadHeader("it ends within its header") from None
        self.place += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        num_bytes = self.number("Q")
        return str(self._bytes(num_bytes), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise BadHeader(f"a value of the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self._texts(count)
        if kind not in _NUMBERS:
            raise BadHeader(f"an array of the type {kind}")
        letter = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{letter}", self._bytes(count * struct.calcsize(f"<{letter}"))))

    def _texts(self, count: int) -> list[str]:
        if count * struct.calcsize("<Q") > len(self._view):
            raise BadHeader("it ends within its header")
        return [self.text() for _ in range(count)]

    def _bytes(self, num_bytes: int) -> memoryview:
        end = self.place + num_bytes
        if end > len(self._view):
            raise BadHeader("it ends within its header")
        part, self.place = self._view[self.place : end], end
        return part
