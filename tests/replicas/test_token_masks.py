"""Masks of rows: what they forbid in logits on the host, however many tokens they leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replicas.sampling.rules.token_masks import TokenMasks


@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.6, 1.0])
@pytest.mark.parametrize(("vocab_size", "num_words"), [(512, 16), (1_001, 32), (1_001, 40)])
def test_just_what_has_no_bit_is_forbidden(share: float, vocab_size: int, num_words: int) -> None:
    """Also where there are words beyond the vocabulary, in rows in between, and of what is not finite."""
    rng = np.random.default_rng(7)
    bits = rng.random((2, 32 * num_words)) < share
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(4, vocab_size)
    logits[:, 3], logits[:, 5], logits[:, 7] = torch.nan, torch.inf, -torch.inf
    expected = logits.clone()
    for row, allowed in zip((1, 3), bits, strict=True):
        expected[row, ~torch.from_numpy(allowed[:vocab_size])] = -torch.inf
    TokenMasks((1, 3), words).forbid(logits)
    assert torch.equal(logits.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@torch.inference_mode()
def test_logits_of_a_step_are_written_in_place() -> None:
    logits = torch.zeros(2, 64)
    TokenMasks((1,), np.array([[1 << 4, 0]], dtype=np.int32)).forbid(logits)
    assert logits[0].tolist() == [0.0] * 64
    assert logits[1].isfinite().nonzero().flatten().tolist() == [4]
