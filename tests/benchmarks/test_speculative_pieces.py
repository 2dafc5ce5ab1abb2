"""What the pieces with drafts make of run times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.gpu import speculative_pieces


def test_a_slow_second_of_the_host_is_in_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts took half a second longer in one run of each number of tokens: that is no time of tokens."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({"vocab_size": 400}))
    options = argparse.Namespace(shape=shape, small=False)
    monkeypatch.setattr(speculative_pieces, "_prompts", lambda text, batch, length, vocab_size: [[1]] * batch)
    calls: dict[tuple[int, int, bool], int] = {}

    def generate(prompts: speculative_pieces.Prompts, num_tokens: int, is_sampled: bool) -> float:
        key = len(prompts), num_tokens, is_sampled
        calls[key] = calls.get(key, 0) + 1
        is_slow = calls[key] == (1 if num_tokens > 1 else 2)
        return 1.7 + 0.012 * (num_tokens - 1) + 0.5 * is_slow

    found = speculative_pieces.all_texts(options, generate)
    assert len(found) == 12
    assert set(found.values()) == {12.0}
