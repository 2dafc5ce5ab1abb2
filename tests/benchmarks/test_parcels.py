"""Parcels: what is cut into parts is the same when it is put together; what is missing has a name."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.parcels import contents, trimming
from benchmarks.gpu.parcels.archive import write_archive
from benchmarks.gpu.parcels.part import BrokenPart, PartHeader, digest_of, join, read_header, split
from benchmarks.gpu.parcels.unpack import gather, missing, unpack
from benchmarks.gpu.parcels.wheels import lacking, name_of

MOST = 4096


def archive(path: Path, num_bytes: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(num_bytes))
    return path


def tree(folder: Path, text: str = "print()\n") -> Path:
    """A package, a program and a link."""
    (folder / "package" / "empty").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text(text)
    (folder / "package" / "numbers.bin").write_bytes(random.Random(1).randbytes(9000))
    program = folder / "package" / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    (folder / "package" / "link").symlink_to("program")
    return folder


@pytest.mark.parametrize("num_bytes", [0, 1, MOST - 1024, MOST - 1023, 10 * MOST + 7])
def test_joined_parts_are_what_was_split(num_bytes: int, tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole", num_bytes)
    parts = split(whole, "site", "site", tmp_path / "out", MOST)
    assert len(parts) == max(1, -(-num_bytes // (MOST - 1024)))
    assert all(path.stat().st_size <= MOST for path in parts)
    assert [path.name for path in parts] == [f"site.{number}" for number in range(len(parts))]
    join(parts[::-1], tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == whole.read_bytes()


def test_a_part_says_what_it_is_of(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole", 3 * MOST)
    parts = split(whole, "vllm", "vllm-site", tmp_path / "out", MOST)
    headers = [PartHeader("vllm", "vllm-site", number, 4, digest_of(whole)) for number in range(4)]
    assert [read_header(path) for path in parts] == headers


def test_parts_of_an_earlier_packing_do_not_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert len(split(archive(tmp_path / "long", 5 * MOST), "site", "site", out, MOST)) > 2
    split(archive(tmp_path / "other", 10), "model", "site", out, MOST)
    split(archive(tmp_path / "short", 10), "site", "site", out, MOST)
    assert sorted(path.name for path in out.iterdir()) == ["model.0", "site.0"]


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    parts = split(archive(tmp_path / "whole", 2 * MOST), "site", "site", tmp_path / "out", MOST)
    damaged = bytearray(parts[1].read_bytes())
    damaged[-1] ^= 1
    parts[1].write_bytes(damaged)
    with pytest.raises(BrokenPart, match="site: its parts together are not what was packed"):
        join(parts, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\x01\x02",
        b"[1]\n",
        b'{"kind": "another"}\n',
        b'{"kind": "splitserve part 1", "parcel": "site"}\n',
        json.dumps(
            {"kind": "splitserve part 1", "parcel": "../x", "into": "a", "number": 0, "count": 1, "digest": ""}
        ).encode()
        + b"\n",
    ],
)
def test_what_is_no_part_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "site.0").write_bytes(line)
    with pytest.raises(BrokenPart, match=r"site\.0 is no part"):
        read_header(tmp_path / "site.0")


def test_an_archive_is_the_same_bytes_whenever_it_is_made(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    os.utime(two / "package" / "__init__.py", (1, 1))
    for is_compressed in (True, False):
        archives = [tmp_path / f"{number}-{is_compressed}" for number in (1, 2)]
        for folder, path in zip((one, two), archives, strict=True):
            write_archive(folder, path, is_compressed=is_compressed)
        assert archives[0].read_bytes() == archives[1].read_bytes()


@pytest.mark.parametrize("is_compressed", [True, False])
def test_unpacked_when_the_last_part_has_come(is_compressed: bool, tmp_path: Path) -> None:
    folder, base = tree(tmp_path / "folder"), tmp_path / "base"
    write_archive(folder, tmp_path / "archive", is_compressed=is_compressed)
    parts = split(tmp_path / "archive", "site", "site", tmp_path / "out", MOST)
    assert len(parts) >= 3
    gather([parts[-1]], base)
    gather([parts[0], parts[-1]], base)
    assert missing(base) == {"site": [path.name for path in parts[1:-1]]}
    for path in (parts[0], parts[-1]):
        path.unlink()  # what has travelled once need not be there again
    gather(parts[1:-1], base)
    assert missing(base) == {"site": []}
    site = unpack("site", base)
    assert site == base / "site"
    for path in (folder / "package").iterdir():
        if path.is_file():
            assert (site / "package" / path.name).read_bytes() == path.read_bytes()
    assert (site / "package" / "link").readlink() == Path("program")
    assert os.access(site / "package" / "program", os.X_OK)
    gather(parts[1:-1], base)
    assert missing(base) == {}, "it is unpacked already"


def test_parts_of_two_packings_are_not_put_together(tmp_path: Path) -> None:
    base = tmp_path / "base"
    old = split(archive(tmp_path / "old", 2 * MOST, seed=1), "site", "site", tmp_path / "a", MOST)
    new = split(archive(tmp_path / "new", 2 * MOST, seed=2), "site", "site", tmp_path / "b", MOST)
    gather(old[:2], base)
    gather(new[2:], base)
    assert missing(base) == {"site": ["site.0", "site.1"]}


def unpack_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.parcels.unpack", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=contents.ROOT)


def test_the_command_names_what_is_missing_until_nothing_is(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    for name, into in (("site", "site"), ("vllm", "vllm-site")):
        write_archive(tree(tmp_path / name, f"name = {name!r}\n"), tmp_path / "archive", is_compressed=True)
        split(tmp_path / "archive", name, into, out, MOST)
    late = out / "vllm.1"
    late.rename(tmp_path / "late")
    done = unpack_command(str(out), "--base", str(base))
    assert done.returncode == 1
    assert "vllm: still missing vllm.1\n" in done.stdout
    assert "unpacked: site\n" in done.stdout
    assert (base / "site" / "package" / "__init__.py").read_text() == "name = 'site'\n"
    assert unpack_command(str(tmp_path / "nothing"), "--needs", "site", "--base", str(base)).returncode == 0
    done = unpack_command("--needs", "site", "vllm", "model", "--base", str(base))
    assert (done.returncode, done.stderr) == (1, "needed and not there: model, vllm\n")
    (tmp_path / "late").rename(late)
    for _ in range(2):
        done = unpack_command(str(late), "--base", str(base))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("unpacked: site, vllm\n")
    assert (base / "vllm-site" / "package" / "__init__.py").read_text() == "name = 'vllm'\n"
    (out / "site.0").write_bytes(b"something else\n")
    done = unpack_command(str(out), "--base", str(base))
    assert done.returncode == 1
    assert "site.0 is no part" in done.stderr


def test_every_dependency_is_packed_or_present() -> None:
    project = tomllib.loads((contents.ROOT / "pyproject.toml").read_text())["project"]
    asked = {name_of(text) for text in contents.requirements()}
    assert {name_of(text) for text in project["dependencies"]} <= asked | contents.present()
    assert {"ray", "nixl-cu13", "llguidance", "gguf", "pytest-asyncio"} <= asked
    assert not {"torch", "transformers", "numpy"} & asked
    assert "grpcio" not in contents.present(), "that one is too old for Ray"


def test_a_requirements_name() -> None:
    assert [name_of(text) for text in ("ray[serve]==2.60.0", "mistral_common>=1.11.5", "NIXL-cu13>=1.5,<2")] == [
        "ray",
        "mistral-common",
        "nixl-cu13",
    ]


def test_of_what_is_needed_only_what_lacks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip as it is, with an index that is a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, needs in (("one-thing", "two_thing>=1"), ("two-thing", "three-thing"), ("three-thing", "")):
        make_wheel(wheels, name, "1.5", needs)
    make_wheel(wheels, "one-thing", "1.7", "two_thing>=1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (tmp_path / "constraints.txt").write_text("one-thing==1.5\n")
    assert lacking(["one-thing"], {"two-thing"}) == ["one-thing==1.7", "three-thing==1.5"]
    assert lacking(["one-thing>1"], {"three-thing"}, tmp_path / "constraints.txt") == [
        "one-thing==1.5",
        "two-thing==1.5",
    ]


def make_wheel(folder: Path, name: str, version: str, needs: str) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [f"Name: {name}", f"Version: {version}", *([f"Requires-Dist: {needs}"] if needs else [])]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def test_what_is_trimmed(tmp_path: Path) -> None:
    kept = ["ray/serve/api.py", "nixl_cu13.libs/nixl/libplugin_UCX.so", "nixl_cu13.libs/ucx/libuct_cuda.so"]
    kept += ["virtualenv/seed/wheels/embed/__init__.py"]
    dropped = ["ray/rllib/x.py", "ray/serve/tests/x.py", "nixl_cu13.libs/nixl/libplugin_GDS.so", "bin/py-spy"]
    dropped += ["nixl_cu13.libs/libaws-1.so", "virtualenv/seed/wheels/embed/pip-1-py3-none-any.whl"]
    for name in (*kept, *dropped):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("no program\n")
    trimming.trim(tmp_path, (*trimming.RAY, *trimming.NIXL, *trimming.OTHERS))
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert [name for name in dropped if (tmp_path / name).exists()] == []
