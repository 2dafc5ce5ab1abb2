"""The folder of a converted GGUF goes by the file's content: no other model is ever served out of it."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from replicas.gguf import conversion as gguf_conversion
from replicas.gguf import weights as gguf_weights
from replicas.gguf.conversion import convert, converted_folder, is_converted, resolve_source
from replicas.model_support import UnsupportedModel
from tests.replicas.tiny_gguf import gguf_of, tiny_model

NORM = "model.norm.weight"
HEADER_BYTES = 1 << 20  # as with a real vocabulary


def write(path: Path, seed: int = 0, header_bytes: int = 0) -> np.ndarray[Any, Any]:
    """A file with the metadata and the size of every other seed's. Its last norm, to tell them apart."""
    model = tiny_model(seed=seed)
    gguf = gguf_of(model, "llama")
    gguf.metadata["general.description"] = "x" * header_bytes
    gguf.write(path)
    norm: np.ndarray[Any, Any] = model.state_dict()[NORM].numpy()
    return norm


def norm_in(folder: Path) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = load_file(folder / "model.safetensors")[NORM]
    return values


def test_two_fine_tunes_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    norms = {name: write(tmp_path / name / "model.gguf", seed, HEADER_BYTES) for seed, name in enumerate(("v1", "v2"))}
    first, second = (tmp_path / name / "model.gguf" for name in norms)
    assert first.stat().st_size == second.stat().st_size
    assert first.read_bytes()[:HEADER_BYTES] == second.read_bytes()[:HEADER_BYTES]
    folders = {name: convert(tmp_path / name / "model.gguf", tmp_path / "cache") for name in norms}
    assert folders["v1"] != folders["v2"]
    for name, norm in norms.items():
        assert (norm_in(folders[name]) == norm).all()


def test_weights_far_behind_the_header_count(tmp_path: Path) -> None:
    """One byte, three megabytes into the file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20) + b"a")
    first = converted_folder(path, tmp_path)
    path.write_bytes(bytes(3 << 20) + b"b")
    assert converted_folder(path, tmp_path) != first


def test_a_file_replaced_in_place_is_converted_anew(tmp_path: Path) -> None:
    """Path, size and times are the old one's, as after rsync --times."""
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write(path, 0, HEADER_BYTES)
    before = path.stat()
    first = convert(path, cache)
    norm = write(path, 1, HEADER_BYTES)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = convert(path, cache)
    assert second != first
    assert (norm_in(second) == norm).all()


def test_the_same_content_elsewhere_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "model.gguf")
    folder = convert(tmp_path / "a" / "model.gguf", tmp_path / "cache")
    monkeypatch.setattr(gguf_weights, "write_model", lambda *_: pytest.fail("converted twice"))
    assert convert(tmp_path / "b" / "model.gguf", tmp_path / "cache") == folder


@pytest.mark.parametrize("library", ["transformers", "gguf"])
def test_another_version_of_what_converts_converts_anew(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"content")
    before = converted_folder(path, tmp_path)
    monkeypatch.setattr(gguf_conversion, "version", lambda name: "99" if name == library else "1")
    after = converted_folder(path, tmp_path)
    monkeypatch.setattr(gguf_conversion, "version", lambda name: "1")
    assert len({before, after, converted_folder(path, tmp_path)}) == 3


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "lost"),
        ("model.safetensors", "shortened"),
        ("config.json", "lost"),
        ("complete", "shortened"),
    ],
)
def test_a_folder_that_is_not_whole_is_made_anew(name: str, damage: str, tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    norm = write(path)
    folder = convert(path, cache)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "shortened":
        (folder / name).write_bytes(content[: len(content) // 2])
    assert not is_converted(folder)
    assert convert(path, cache) == folder
    assert (folder / name).read_bytes() == content
    assert (norm_in(folder) == norm).all()


def test_an_interrupted_conversion_is_done_again(tmp_path: Path) -> None:
    """A process that is killed halfway leaves a folder under another name."""
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    norm = write(path)
    child = multiprocessing.get_context("fork").Process(target=_convert_until_killed, args=(path, cache))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -9
    folder = converted_folder(path, cache)
    (leftover,) = (entry for entry in cache.iterdir() if entry.is_dir())
    assert leftover != folder
    assert (leftover / "config.json").exists()
    assert convert(path, cache) == folder
    assert (norm_in(folder) == norm).all()
    assert not leftover.exists()


def _convert_until_killed(path: Path, cache: Path) -> None:
    """Runs in a child: dies when config.json is there and the weights are not."""

    def write_half(gguf: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.kill(os.getpid(), 9)

    gguf_weights.write_model = write_half
    convert(path, cache)


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_file_that_changes_while_it_is_converted_is_refused(
    is_restored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the old content is back, with its times, before anybody looks."""
    path, other, cache = tmp_path / "model.gguf", tmp_path / "other.gguf", tmp_path / "cache"
    write(path, 0)
    norm = write(other, 1)
    original, before = path.read_bytes(), path.stat()
    write_model = gguf_weights.write_model
    seen = []

    def changing(gguf: Path, folder: Path) -> None:
        gguf.write_bytes(other.read_bytes())
        write_model(gguf, folder)
        seen.append(norm_in(folder))
        if is_restored:
            gguf.write_bytes(original)
            os.utime(gguf, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(gguf_weights, "write_model", changing)
    with pytest.raises(UnsupportedModel, match=r"model\.gguf changed while it was converted"):
        convert(path, cache)
    assert (seen[0] == norm).all()  # it would have been the wrong one
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the file system's: threads that open it are as good as processes."""
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write(path)
    write_model = gguf_weights.write_model
    started: list[Path] = []

    def slow(gguf: Path, folder: Path) -> None:
        started.append(folder)
        time.sleep(0.5)
        write_model(gguf, folder)

    monkeypatch.setattr(gguf_weights, "write_model", slow)
    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(lambda _: convert(path, cache), range(2)))
    assert len(started) == 1
    assert folders == [converted_folder(path, cache)] * 2
    assert is_converted(folders[0])


def test_what_is_no_gguf_is_left_alone(tmp_path: Path) -> None:
    assert resolve_source("org/name", str(tmp_path)) == "org/name"
    assert resolve_source("/some/folder", str(tmp_path)) == "/some/folder"
    assert list(tmp_path.iterdir()) == []


def test_hashing_a_big_file_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1 << 16))
    clock = itertools.count()  # other threads look at it, too
    monkeypatch.setattr(gguf_conversion, "_CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO):
        converted_folder(path, tmp_path)
    told = [record.__dict__ for record in caplog.records]
    assert [of["state"] for of in told] == ["begun", *["running"] * 4, "done"]
    assert [(of["done"], of["total"]) for of in told[1:-1]] == [(part << 14, 1 << 16) for part in (1, 2, 3, 4)]


def test_what_is_written_down_is_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    folder = convert(path, tmp_path / "cache")
    sizes = json.loads((folder / "complete").read_text())
    assert sizes == {
        entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.name != "complete" and entry.is_file()
    }
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= sizes.keys()
