"""The comparison of two engines: what is counted as a steady step, who is called better, text for every token id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.offline_workload import OfflineRun, Prompts, measure, steady_window_ms
from benchmarks.gpu.shape_folder import make_shape_folder
from benchmarks.gpu.side_by_side import as_table


class CountingEngine:
    """Takes a second for each token of output and a thousandth for each of a prompt."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> OfflineRun:
        self.batches.append(len(prompts))
        duration_s = sum(map(len, prompts)) / 1000 + max(max_tokens)
        return OfflineRun(duration_s, sum(max_tokens), 1000.0 if min(max_tokens) > 1 else None)

    def close(self) -> None:
        pass


def test_every_figure_comes_from_the_engine() -> None:
    engine = CountingEngine()
    figures = measure(engine)
    assert [figures[f"step B={batch}, ms"] for batch in (1, 16, 64, 256)] == [1000.0] * 4
    assert figures["prefill 1x512, ms"] == pytest.approx(1512)
    assert figures["prefill 4x8192, tok/s"] == pytest.approx(32768 / 33.768)
    assert max(engine.batches) == 256
    (offline,) = (value for name, value in figures.items() if name.startswith("offline"))
    assert 10 < offline < 1024 * 256 / 100


def test_steady_steps_are_those_in_which_all_have_tokens() -> None:
    """Two sequences of 20 tokens; the second begins 5 steps later. Prompts delay the steps before, none between."""
    times_s = [10.0 + 3.0 * step for step in range(5)] + [100.0 + 0.5 * step for step in range(20)]
    assert steady_window_ms(times_s, first_end=19, num_tokens=20) == pytest.approx(500.0)
    assert steady_window_ms(times_s, first_end=10, num_tokens=20) is None, "too few steps"
    assert steady_window_ms(times_s[:10], first_end=9, num_tokens=20) is None


def test_more_is_better_for_rates_and_less_for_times() -> None:
    vllm = {"figures": {"step B=1, ms": 6.0, "offline, tok/s": 100.0, "only theirs, ms": 1.0}}
    ours = {"figures": {"step B=1, ms": 5.0, "offline, tok/s": 80.0}}
    text = as_table("shape", {"vllm": vllm, "ours": ours})
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "," in line}
    assert "1.20x" in lines["step B=1, ms"]
    assert "0.80x" in lines["offline, tok/s"]
    assert lines["only theirs, ms"].count(" - |") == 2
    assert "vllm: it broke" in as_table("shape", {"vllm": {"error": "it broke"}, "ours": ours})


def test_every_id_of_a_shape_has_text(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    spec = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    (tokenizer / "tokenizer.json").write_text(json.dumps(spec))
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"vocab_size": 6}))
    folder = make_shape_folder(shape, tmp_path / "model", tokenizer)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted([*vocabulary.values(), 2]) == list(range(6))
    assert len(set(vocabulary)) == 5
    assert json.loads((folder / "config.json").read_text()) == {"vocab_size": 6}
