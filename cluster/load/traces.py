"""Recorded workloads: Azure's CSV files and Mooncake's JSON lines. They hold times and lengths, no text."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import orjson

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One recorded request. Prompts share a prefix as far as their hash_ids agree, block by block of block_tokens."""

    timestamp_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def scaled(self, factor: float, max_input_len: int | None, max_output_len: int | None) -> TraceEntry:
        """For a server that is too small for the trace: lengths and blocks times factor, then cut; at least 1."""
        return replace(
            self,
            input_len=_scaled(self.input_len, factor, max_input_len),
            output_len=_scaled(self.output_len, factor, max_output_len),
            block_tokens=_scaled(self.block_tokens, factor, None),
        )


def read_trace(path: Path, num_requests: int | None = None) -> list[TraceEntry]:
    """The file's requests, or the first so many. Raises ValueError naming the line that is not as it should be."""
    readers: dict[str, Callable[[Path], Iterator[TraceEntry]]] = {".csv": _read_azure, ".jsonl": _read_mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: a trace is a .csv file (Azure) or a .jsonl file (Mooncake)")
    return list(islice(reader(path), num_requests))


def _read_azure(path: Path) -> Iterator[TraceEntry]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _AZURE_COLUMNS:
            raise ValueError(f"{path}: expected the columns {','.join(_AZURE_COLUMNS)}, found {reader.fieldnames}")
        for row in reader:
            try:
                yield TraceEntry(
                    timestamp_s=(datetime.fromisoformat(row["TIMESTAMP"]) - _EPOCH).total_seconds(),
                    input_len=_length(row["ContextTokens"]),
                    output_len=_length(row["GeneratedTokens"]),
                )
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _read_mooncake(path: Path) -> Iterator[TraceEntry]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
                yield TraceEntry(
                    timestamp_s=row["timestamp"] / 1000,
                    input_len=_length(row["input_length"]),
                    output_len=_length(row["output_length"]),
                    hash_ids=tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error


def _length(value: str | int) -> int:
    length = int(value)
    if length < 0:
        raise ValueError(f"a length of {length}")
    return max(1, length)  # a server refuses an empty prompt, and an answer of nothing


def _scaled(length: int, factor: float, most: int | None) -> int:
    return max(1, min(math.inf if most is None else most, round(length * factor)))  # type: ignore[return-value]
