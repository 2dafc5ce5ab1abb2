"""python -m benchmarks.gpu.parcels.pack FOLDER [PARCEL ...]: all that a lent machine without a network lacks.

Makes FOLDER/site.0, model.0, model.1 and so on: parts, each small enough to travel in one call beside the tree (62 MiB
of the 64 that may). site: packages, and a tokenizer. model: the bundled GGUF, for tests/gpu. vllm: the baseline, only
where it is named. `benchmarks.gpu.parcels.unpack` puts them together there. Needs the network, and `make setup`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.parcels.archive import write_archive
from benchmarks.gpu.parcels.contents import PARCELS
from benchmarks.gpu.parcels.part import split
from benchmarks.gpu.parcels.wheels import NoWheels

_MIB = 1 << 20


def pack(name: str, out: Path, tokenizer: Path | None, most_bytes: int) -> list[Path]:
    """Its parts. Blocks for minutes; downloads. Prints how it goes."""
    parcel = PARCELS[name]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder, archive = Path(temporary) / "contents", Path(temporary) / "archive"
        folder.mkdir()
        parcel.fill(folder, tokenizer)
        _say(name, f"{_mib_of(folder)} MiB to pack after {time.monotonic() - started_s:.0f} s")
        write_archive(folder, archive, is_compressed=parcel.is_compressed)
        parts = split(archive, name, parcel.into, out, most_bytes)
    for part in parts:
        _say(name, f"{part} {part.stat().st_size / _MIB:.1f} MiB")
    _say(name, f"{time.monotonic() - started_s:.0f} s")
    return parts


def _mib_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*")) // _MIB


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FOLDER")
    parser.add_argument("parcels", nargs="*", default=["site", "model"], metavar="PARCEL", help=", ".join(PARCELS))
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json; default: the bundled model's")
    parser.add_argument("--part-mib", type=float, default=54.0, help="most of a part")
    options = parser.parse_args()
    if unknown := set(options.parcels) - set(PARCELS):
        parser.error(f"no such parcel: {', '.join(sorted(unknown))}")
    try:
        for name in options.parcels:
            pack(name, options.out, options.tokenizer, int(options.part_mib * _MIB))
    except (NoWheels, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
