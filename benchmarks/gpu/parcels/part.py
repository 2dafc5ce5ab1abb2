"""A part of a parcel: one file that says in its first line of what it is a part, and which.

A parcel is an archive that is too large to travel at once. Its parts travel in any order, in calls that may be minutes
apart, and are put together byte by byte where they arrive.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_KIND = "splitserve part 1"
_MOST_HEADER_BYTES = 1024
_CHUNK_BYTES = 1 << 20


class BrokenPart(Exception):
    """No part, or not whole; the message says which file, and what to do."""


@dataclass(frozen=True, slots=True)
class PartHeader:
    """into: the folder that the parcel is unpacked into, by its name. number: from 0. digest: SHA-256 of all count
    parts' bytes one behind the other, so that of one and the same archive."""

    parcel: str
    into: str
    number: int
    count: int
    digest: str

    def __post_init__(self) -> None:
        """Raises ValueError: names become paths where they arrive."""
        for name in (self.parcel, self.into):
            if not name.replace("-", "").isalnum():
                raise ValueError(f"{name!r} is no name")
        if not 0 <= self.number < self.count:
            raise ValueError(f"part {self.number} of {self.count}")

    @property
    def file_name(self) -> str:
        return f"{self.parcel}.{self.number}"


def split(archive: Path, parcel: str, into: str, folder: Path, most_bytes: int) -> list[Path]:
    """Parts of about the same size, none larger than most_bytes. Writes them, and deletes older ones of this parcel."""
    num_bytes = archive.stat().st_size
    count = max(1, -(-num_bytes // (most_bytes - _MOST_HEADER_BYTES)))
    size = -(-num_bytes // count)
    digest = digest_of(archive)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{parcel}.*"):
        old.unlink()
    paths = []
    with archive.open("rb") as file:
        for number in range(count):
            header = PartHeader(parcel, into, number, count, digest)
            paths.append(folder / header.file_name)
            with paths[-1].open("wb") as part:
                part.write(json.dumps({"kind": _KIND} | asdict(header)).encode() + b"\n")
                part.write(file.read(size))
    return paths


def read_header(path: Path) -> PartHeader:
    """Raises BrokenPart."""
    with path.open("rb") as file:
        line = file.readline(_MOST_HEADER_BYTES)
    try:
        fields = json.loads(line)
        if fields.pop("kind") != _KIND:
            raise ValueError("of another kind")
        return PartHeader(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenPart(f"{path} is no part of a parcel: {error}") from None


def join(parts: Sequence[Path], archive: Path) -> None:
    """Writes what was split. parts: all of one parcel, in any order. Raises BrokenPart when it is not the same."""
    ordered = sorted((read_header(path).number, path) for path in parts)
    with archive.open("wb") as file:
        for _, path in ordered:
            with path.open("rb") as part:
                part.readline(_MOST_HEADER_BYTES)
                shutil.copyfileobj(part, file, _CHUNK_BYTES)
    if {read_header(path).digest for path in parts} != {digest_of(archive)}:
        archive.unlink()
        parcel = read_header(parts[0]).parcel
        raise BrokenPart(f"{parcel}: its parts together are not what was packed; send all of them again")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
