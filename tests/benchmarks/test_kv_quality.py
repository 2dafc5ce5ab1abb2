"""What KV in 8 bits costs in quality, as the benchmark measures it, over less text."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kv_quality import fixed_text, load_bundled, needle_prompt, needles, perplexities


@pytest.mark.slow
def test_perplexity_is_little_more_and_a_sentence_is_found_as_without() -> None:
    """Over so little text the change is 1 % give or take another; RESULTS.md has it over more."""
    torch.set_num_threads(1)
    loaded, tokenizer = load_bundled(512)
    found = perplexities(loaded, tokenizer(fixed_text()[:6000]).input_ids[:1024], window=256)
    assert 5 < found["auto"] < 60
    assert 0.0 < abs(found["fp8"] / found["auto"] - 1) < 0.025
    token_ids, num_found = needle_prompt(tokenizer, 300, 0.5)
    assert tokenizer.decode(token_ids[-num_found:]) == " 48213"
    for line in needles(loaded, tokenizer, [300]):
        assert "auto found" in line
        assert "fp8 found" in line
