"""Trace files, and prompts that share what the trace says is shared."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import chat
from cluster.load.length_range import LengthRange
from cluster.load.traces import MOONCAKE_BLOCK_TOKENS, TraceEntry, read_trace
from cluster.load.workload import PromptMaker, Shape, synthetic_shapes

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}

{"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [0, 9]}
"""
SHARED = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_azure(azure: Path) -> None:
    first, second = read_trace(azure)
    assert (first.input_len, first.output_len, first.hash_ids) == (4808, 10, ())
    assert second.timestamp_s - first.timestamp_s == pytest.approx(0.052, abs=1e-6)


def test_mooncake(mooncake: Path) -> None:
    assert read_trace(mooncake) == [TraceEntry(0.0, 1100, 5, (0, 7, 8)), TraceEntry(1.5, 600, 6, (0, 9))]


def test_reads_only_as_many_as_asked_for(azure: Path) -> None:
    assert len(read_trace(azure, 1)) == 1


def test_names_the_line_that_is_wrong(azure: Path, mooncake: Path) -> None:
    azure.write_text(AZURE + "2023-11-16 18:17:05,many,8\n")
    with pytest.raises(ValueError, match=r"azure\.csv, line 4: .*many"):
        read_trace(azure)
    mooncake.write_text(MOONCAKE + '{"timestamp": 0}\n')
    with pytest.raises(ValueError, match=r"mooncake\.jsonl, line 4: .*input_length"):
        read_trace(mooncake)


def test_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace is"):
        read_trace(tmp_path / "trace.txt")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_trace(tmp_path / "other.csv")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the traces are not on this machine")
@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"])
def test_reads_the_real_ones(name: str) -> None:
    entries = read_trace(SHARED / name, 2_000)
    assert len(entries) == 2_000
    assert all(entry.input_len > 0 and entry.output_len > 0 for entry in entries)
    assert all(earlier.timestamp_s <= later.timestamp_s for earlier, later in pairwise(entries))


def test_scaled_for_a_small_server() -> None:
    entry = TraceEntry(0.0, 1000, 300, (1, 2))
    scaled = entry.scaled(0.25, max_input_len=200, max_output_len=None)
    assert (scaled.input_len, scaled.output_len, scaled.block_tokens) == (200, 75, 128)
    assert TraceEntry(0.0, 1, 1).scaled(0.01, None, None).input_len == 1


def test_equal_hashes_are_equal_tokens(mooncake: Path) -> None:
    maker = PromptMaker(seed=0, first_id=1_000, last_id=30_000)
    first, second = (maker.token_ids(index, Shape.of(entry)) for index, entry in enumerate(read_trace(mooncake)))
    assert (len(first), len(second)) == (1100, 600)
    assert np.array_equal(first[:512], second[:512])
    assert not np.array_equal(first[512:600], second[512:600])


def test_hashes_that_do_not_cover_a_prompt_leave_the_rest_its_own() -> None:
    maker = PromptMaker(seed=0, first_id=1_000, last_id=30_000)
    prompts = [maker.token_ids(index, Shape(30, 1, (5,), 16)) for index in range(2)]
    assert np.array_equal(prompts[0][:16], prompts[1][:16])
    assert not np.array_equal(prompts[0][16:], prompts[1][16:])


def test_prompts_without_hashes_share_nothing_and_are_seeded() -> None:
    shape = Shape(64, 1)
    maker = PromptMaker(seed=1, first_id=10, last_id=20_000)
    one, other = maker.token_ids(0, shape), maker.token_ids(1, shape)
    assert one[0] != other[0]
    assert np.array_equal(one, PromptMaker(1, 10, 20_000).token_ids(0, shape))
    assert not np.array_equal(one, PromptMaker(2, 10, 20_000).token_ids(0, shape))
    assert one.min() >= 10
    assert one.max() <= 20_000


def test_text_has_a_word_for_each_token() -> None:
    assert len(PromptMaker(0, 0, 100).text(0, Shape(37, 1)).split(" ")) == 37


def test_synthetic_lengths() -> None:
    shapes = synthetic_shapes(2_000, LengthRange(10, 20), LengthRange(5, 5), seed=0)
    assert {shape.input_len for shape in shapes} == set(range(10, 21))
    assert {shape.output_len for shape in shapes} == {5}
    assert shapes == synthetic_shapes(2_000, LengthRange(10, 20), LengthRange(5, 5), seed=0)


def test_length_ranges() -> None:
    assert LengthRange.parse("128") == LengthRange(128, 128)
    assert LengthRange.parse("64:256") == LengthRange(64, 256)
    for wrong in ("0", "9:3", "many"):
        with pytest.raises(ValueError):
            LengthRange.parse(wrong)


def test_the_trace_of_our_own_is_what_its_script_makes() -> None:
    assert chat.FILE.read_text() == chat.chat_trace(), "run: python -m benchmarks.traces.chat"


def test_turns_of_the_trace_of_our_own_share_what_was_said_before() -> None:
    entries = read_trace(chat.FILE)
    assert [entry.timestamp_s for entry in entries] == sorted(entry.timestamp_s for entry in entries)
    assert len(entries) > 150
    assert all(len(entry.hash_ids) == -(-entry.input_len // MOONCAKE_BLOCK_TOKENS) for entry in entries)
    firsts = {entry.hash_ids[0] for entry in entries}
    assert firsts == {0, 1, 2}  # one of the system prompts
    whole = {entry.hash_ids for entry in entries}
    continued = [
        entry for entry in entries if any(entry.hash_ids[:end] in whole for end in range(3, len(entry.hash_ids)))
    ]
    assert len(continued) > 50
