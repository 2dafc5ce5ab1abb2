"""python3 -m benchmarks.gpu.parcels.unpack FOLDER: parcels put together where their parts have arrived, and unpacked.

Takes the parts that lie in FOLDER (files are named too) into --base, where they stay until the others have come, and
unpacks each parcel that is whole: site and model into BASE/site, vllm into BASE/vllm-site. Says which parts are still
missing. Exits with 1 while any is, or, with --needs, until those parcels are there. Again costs nothing. Needs nothing
but Python, tar and xz.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.parcels.part import BrokenPart, PartHeader, join, read_header

_KEPT = "parcels"  # in the base: parts that wait for others, and of each parcel what was unpacked last


def gather(found: Iterable[Path], base: Path) -> None:
    """Copies parts to where they wait. Those of an older packing of the same parcel are deleted. Raises BrokenPart."""
    kept = base / _KEPT
    kept.mkdir(parents=True, exist_ok=True)
    for path in found:
        header = read_header(path)
        if _unpacked(header, base) == header.digest:
            continue
        for old in kept.glob(f"{header.parcel}.*"):
            if read_header(old).digest != header.digest:
                old.unlink()
        arriving = kept / ".arriving"
        shutil.copyfile(path, arriving)
        arriving.rename(kept / header.file_name)


def missing(base: Path) -> dict[str, list[str]]:
    """Of each parcel that waits the names of the parts that it waits for; none: it is whole."""
    waiting: dict[str, list[str]] = {}
    for header, _ in _waiting(base):
        names = (f"{header.parcel}.{number}" for number in range(header.count))
        waiting[header.parcel] = [name for name in names if not (base / _KEPT / name).exists()]
    return waiting


def unpack(parcel: str, base: Path) -> Path:
    """A parcel that is whole; its parts are deleted. Returns the folder. Blocks for some seconds. Raises BrokenPart."""
    parts = [(header, path) for header, path in _waiting(base) if header.parcel == parcel]
    header = parts[0][0]
    archive, folder = base / _KEPT / f".{parcel}", base / header.into
    join([path for _, path in parts], archive)
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    archive.unlink()
    _note(header, base).write_text(header.digest)
    for _, path in parts:
        path.unlink()
    return folder


def _waiting(base: Path) -> list[tuple[PartHeader, Path]]:
    return [(read_header(path), path) for path in sorted((base / _KEPT).glob("[!.]*.[0-9]*"))]


def _note(header: PartHeader, base: Path) -> Path:
    return base / _KEPT / f"{header.parcel}-unpacked"


def _unpacked(header: PartHeader, base: Path) -> str | None:
    """The digest of what was unpacked last."""
    note = _note(header, base)
    return note.read_text() if note.exists() else None


def _parts_in(path: Path) -> list[Path]:
    """None where there is no such path: nothing came with this call."""
    if path.is_file():
        return [path]
    return sorted(path.glob("*.[0-9]*"))


def main() -> int:
    """0 when what is needed is there, or no parcel waits for a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--needs", nargs="+", default=[], metavar="PARCEL")
    parser.add_argument("--base", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    started_s = time.monotonic()
    is_whole = True
    try:
        gather([part for path in options.found for part in _parts_in(path)], options.base)
        for parcel, names in missing(options.base).items():
            if names:
                is_whole = False
                print(f"{parcel}: still missing {', '.join(names)}", flush=True)
            else:
                print(
                    f"{parcel}: {unpack(parcel, options.base)} after {time.monotonic() - started_s:.0f} s", flush=True
                )
    except BrokenPart as error:
        print(error, file=sys.stderr)
        return 1
    there = sorted(note.name.removesuffix("-unpacked") for note in (options.base / _KEPT).glob("*-unpacked"))
    print(f"unpacked: {', '.join(there) or 'nothing'}", flush=True)
    if lacking := set(options.needs) - set(there):
        print(f"needed and not there: {', '.join(sorted(lacking))}", file=sys.stderr)
        return 1
    return 0 if is_whole or options.needs else 1


if __name__ == "__main__":
    raise SystemExit(main())
