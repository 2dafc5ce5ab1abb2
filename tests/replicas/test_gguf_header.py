"""The header of a GGUF file, as gguf's own reader has it; and whatever is wrong with one is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter

from cluster.config.model import find_bundled_gguf
from replicas.gguf.header import BadHeader, NotGguf, opened_gguf
from tests.replicas.tiny_gguf import gguf_of, tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(tiny_model("LlamaConfig"), "llama").write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def bundled() -> Path:
    path = find_bundled_gguf()
    assert path is not None
    return path


@pytest.mark.parametrize("name", ["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def test_it_is_what_ggufs_own_reader_has(name: str, tiny: Path) -> None:
    path = tiny if name == "tiny" else bundled()
    theirs: Any = GGUFReader(path)
    with opened_gguf(path) as (header, view):
        fields = {key: of.contents() for key, of in theirs.fields.items() if not key.startswith("GGUF.")}
        assert header.metadata == fields
        assert [*header.tensors] == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            ours = header.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert (ours.kind, ours.offset, ours.num_bytes) == (
                tensor.tensor_type.name,
                tensor.data_offset,
                tensor.n_bytes,
            )
            assert bytes(view[ours.offset : ours.offset + 8]) == bytes(tensor.data.reshape(-1).view("uint8")[:8])


def test_every_type_of_value(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "types.gguf", "llama")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -30_000, "uint32": 2**31 + 1, "int32": -(2**31),
        "float32": 0.5, "uint64": 2**63, "int64": -(2**62), "float64": 0.1, "bool": True, "string": "a ü <|x|>",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"my.{kind}", value)
    writer.add_array("my.numbers", [1, 2, 3])
    writer.add_array("my.texts", ["", "a", "ü"])
    writer.add_array("my.truths", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with opened_gguf(tmp_path / "types.gguf") as (header, _):
        for kind, value in values.items():
            assert header.metadata[f"my.{kind}"] == value
        assert header.metadata["my.numbers"] == [1, 2, 3]
        assert header.metadata["my.texts"] == ["", "a", "ü"]
        assert header.metadata["my.truths"] == [True, False]
        assert header.tensors == {}


def test_a_file_that_was_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    with opened_gguf(tiny) as (header, _):
        end = max(tensor.offset + tensor.num_bytes for tensor in header.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [0, 1, 3, 4, 5, 23, 24, *random.Random(1).sample(range(25, end), 200)]:
        cut.write_bytes(content[:length])
        with pytest.raises(BadHeader), opened_gguf(cut):
            pass


def test_bytes_that_were_changed_end_in_a_refusal_or_in_values(tiny: Path, tmp_path: Path) -> None:
    """Never in another error, in much memory or in a loop."""
    content, rng = bytearray(tiny.read_bytes()), random.Random(2)
    changed = tmp_path / "changed.gguf"
    for _ in range(300):
        place = rng.randrange(4, 6_000)
        before, content[place : place + 8] = content[place : place + 8], rng.randbytes(8)
        changed.write_bytes(content)
        content[place : place + 8] = before
        try:
            with opened_gguf(changed):
                pass
        except (ValueError, KeyError):
            pass


def test_what_is_no_gguf_is_told_from_half_a_gguf(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(NotGguf, match="does not begin with the letters GGUF"), opened_gguf(other):
        pass
